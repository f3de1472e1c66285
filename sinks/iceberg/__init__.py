"""Apache Iceberg, by pyiceberg: `sink` describes, `catalog` connects and explains errors, `table` writes and commits.

May import what `sinks` may import; only `catalog` and `table` import pyiceberg.
"""
