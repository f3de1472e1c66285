"""The runtime of one subtask, whoever runs it, without a thread, client or clock of its own.

Of the engines it may import `engines.plan` alone; all others may import it.
"""
