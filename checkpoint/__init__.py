"""The protocol: how a checkpoint is triggered, aligned, decided, committed, finished after a crash, and cleaned.

Everything here but `store/` is pure: events in, effects out, or procedures that yield requests (`requests`); no client,
no thread, no clock. May import `pipeline` alone. `records/` is what the checkpoint topic says, `transactions/` how
transactions end, `commits/` how what a family of sinks has pre-committed comes to be committed, `store/` what does the
I/O of the checkpoint topic; only `store/` may import a client library. `chandy_lamport/` is the algorithm behind the
barriers, on any graph, with its checker; nothing else here imports it.
"""
