"""Delta Lake, by deltalake (delta-rs): `sink` describes, `table` writes and commits.

May import what `sinks` may import; only `table` imports deltalake.
"""
