"""PostgreSQL: one connection with bounded waits, which tables as sinks share, tables and their changes as sources.

`table_source` describes a source of rows, and `table_rows` reads it. `changes` describes those of changes, which share
a slot: `slot` makes and checks it, `change_stream` has the server's messages, `change_split` puts them behind the rows
that were there, `change_values` makes records. `connection` talks to a server, and has its errors. All but the
descriptions need psycopg, the extra `postgres`. May import `connectors.tables` and what that may import.
"""
