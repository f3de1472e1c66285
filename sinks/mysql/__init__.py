"""MySQL and MariaDB as a sink: rows go into a table, in one transaction with the ledger beside it.

A dialect of `sinks/sql/`: `sink.py` is the description, `store.py` and `prepared.py` the stores; below them
`session.py` (a connection with pinned settings), `table.py` (tables in the server), `literals.py` (values as SQL), and
`refusals.py` (the driver's errors as ours). May import what `sinks` may import. All but the description needs the
driver, PyMySQL, an extra.
"""
