"""The runtime of one subtask in every engine, without a thread, client or clock of its own.

It may import `engines.plan` and no other engine module; all others may import it.
"""
