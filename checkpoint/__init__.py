"""The protocol: how a checkpoint is triggered, aligned, decided, committed, finished after a crash, and cleaned.

Everything here is pure: events in, effects out, or procedures that yield requests (`requests`); no client, no thread,
no clock. May import `pipeline` alone. `records/` is what the checkpoint topic says, `transactions/` how transactions
end, `commits/` how a family of sinks is committed. `block_storage` is the seam of what keeps blocks. `chandy_lamport/`
is the algorithm behind the barriers, on any graph, with its checker; nothing else here imports it.
"""
