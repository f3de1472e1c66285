"""The backend for state that is larger than memory: a cache of states within a budget, over RocksDB in local files.

The blocks of checkpoints stay the truth; local files may be deleted at any time between two runs. A table reads a key
group from its blocks when the first record wants it, and the others between batches. After each barrier it settles the
changes into RocksDB, and takes images from a view of that moment. `files` keeps the local files of checkpoints, for a
worker that restarts on the same machine. Needs the extra `rocksdb`. May import `state`.
"""
