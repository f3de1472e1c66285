"""PostgreSQL: one connection with bounded waits, which tables as sinks share, and tables as sources.

`table_source` describes a source, and `table_rows` reads it; `connection` talks to a server, and has its errors. All
but the description need psycopg, the extra `postgres`. May import `connectors.tables` and what that may import.
"""
