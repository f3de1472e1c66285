"""The ends of transactions: commit, abort, fencing, and markers that a broker has lost. Pure procedures.

May import `checkpoint.records` and `checkpoint.requests`; nothing here decides.
"""
