"""PostgreSQL tables as sinks: rows and their ledger row come in one transaction of the database.

A dialect of `sinks/sql/`. `sink` is the description; `copy_text` is pure. All else needs psycopg, the extra `postgres`;
the connection comes from `connectors/postgres/`. May import what `sinks` may import.
"""
