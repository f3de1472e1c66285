"""What runs one subtask in every engine, without a thread, client or clock of its own.

May import what lies directly in `engines`.
"""
