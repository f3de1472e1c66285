"""The backend for state that is larger than memory: a cache of states within a budget, over RocksDB in local files.

The blocks of checkpoints stay the truth; what lies here can be deleted at any time between two runs. A table reads a
key group from its blocks when the first record wants it, and the others between batches; it settles what records have
changed into RocksDB behind each barrier, and takes images from a snapshot there. `files` keeps the local files of
checkpoints, for a worker that restarts on the same machine. Needs the extra `rocksdb`. May import `state`.
"""
