"""A table in a file of DuckDB: rows wait in the checkpoint topic, and the leader writes all of a checkpoint's in one
transaction with the ledger beside the table.

`sink` is the description. `writer` has rows as Arrow; `committer` opens the file, for one transaction at a time. May
import what `sinks` may import, from `files` and `lake` the columns, and from `sql` the checks of a description. All but
the description needs duckdb and pyarrow, the extra `duckdb`.
"""
