"""Keyed state: key groups, tables, and snapshots that are incremental, asynchronous and sliced. Pure.

A table holds the state of one subtask of one stateful operator. At a barrier it is frozen in constant time, then
encoded in slices between batches, into blocks that name their key groups. A chain of blocks is the state at a
checkpoint; `stored` makes tables from any number of chains, for any parallelism. `backend` is the seam to engines;
`hash_map` keeps its tables in memory, `rocksdb/` also in local files, and is the one folder here that is not pure. May
import `pipeline` and the pure folders of `checkpoint`.
"""
