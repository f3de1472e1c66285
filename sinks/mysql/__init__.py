"""MySQL and MariaDB as a sink: rows go into a table, in one transaction with the ledger beside it.

A dialect of `sinks/sql/`: `sink.py` is the description, `store.py` and `prepared.py` the stores; below them
`session.py` (a connection whose settings are pinned), `table.py` (the table as it is in the server), `literals.py`
(values as SQL), and `refusals.py` (what the driver raises, as errors of ours). May import what `sinks` may import;
nothing here is imported with exactlyonce but the description, for the driver, PyMySQL, is an extra.
"""
