"""The ends of transactions: commit, abort, fencing, and markers that a broker has lost. Pure procedures.

May import `checkpoint.records`, `checkpoint.requests` and `checkpoint.clock`; nothing here decides.
"""
