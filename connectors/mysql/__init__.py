"""MySQL and MariaDB: a session with every setting pinned, which tables as sinks share, and tables as sources.

`table_source` describes a source, and `table_rows` reads it; `session` talks to a server at an `address`, and has its
errors. All but the description need PyMySQL, an extra. May import `connectors.tables` and what that may import.
"""
