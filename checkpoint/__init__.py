"""The protocol: how a checkpoint is triggered, aligned, decided, committed, finished after a crash, and cleaned.

Everything here is pure: events in, effects out, or procedures that yield requests (`requests`); no client, no thread,
no clock. May import `pipeline` alone. `records/` has the records of the checkpoint topic, `transactions/` the ends of
transactions, `commits/` the commit of each family of sinks. `block_storage` is the seam for block storages.
"""
