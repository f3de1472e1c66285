"""Keyed state: key groups, tables, and snapshots that are incremental, asynchronous and sliced. Pure.

A table holds the state of one subtask of one stateful operator. At a barrier it is frozen in constant time; what was
frozen is encoded in slices between batches, into blocks that each say which key groups they hold; a chain of blocks is
the state at a checkpoint; `restore` makes tables from any number of chains, for any parallelism. `backend` is the seam:
what a table is to an engine; `hash_map` keeps its tables in memory, `tiered/` in local files, too, and is the one
folder here that is not pure. May import `pipeline` and the pure folders of `checkpoint`.
"""
