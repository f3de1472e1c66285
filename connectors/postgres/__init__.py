"""PostgreSQL: one connection with bounded waits, which tables as sinks share, and as sources tables and their changes.

`table_source` describes a table as a source, `table_rows` reads it. `changes` describes its changes as one:
`change_stream` reads a slot, `change_split` joins it with the rows that were there, `change_values` has their values.
`connection` talks to a server, and has its errors; `dsn` is shared by the descriptions. All but descriptions need
psycopg, the extra `postgres`. May import `connectors.tables`, `connectors.splits` and what these may import.
"""
