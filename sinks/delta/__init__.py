"""Delta Lake, by deltalake (delta-rs): `sink` describes, `table` writes and commits, `ledger` is kept as transactions.

May import what `sinks` may import; only `table` imports deltalake.
"""
