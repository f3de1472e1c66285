"""MySQL and MariaDB: a session with every setting pinned, also for sinks; tables and their changes as sources.

`table_source` describes a source of rows, and `table_rows` reads it. `changes` describes one of changes: `binlog` is
the server's stream, `binlog_rows` has its rows, `change_split` puts them after the rows that were there, and
`change_values` makes records. `session` talks to a server at an `address`, and has its errors. All but the descriptions
need PyMySQL, an extra. May import `connectors.tables`, `connectors.changes` and what these may import.
"""
