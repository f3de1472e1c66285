"""MySQL and MariaDB as a sink: rows go into a table, in one transaction with the ledger beside it.

A dialect of `sinks/sql/`: `sink.py` is the description, `store.py` the store; below them `table.py` (tables in the
server) and `literals.py` (values as SQL). The session comes from `connectors/mysql/`. May import what `sinks` may
import. All but the description needs the driver, PyMySQL, an extra.
"""
