"""Tables as sinks, whatever the database: the description, and the store with its ledger.

`fields` and `table` are pure: the fields of a record's type, and the columns of a table. A database is a dialect: it
derives from `sink.TableSink` and `store.SqlStore`, and has a `ledger.Session`. Opens nothing, and knows no
driver. May import what `sinks` may import.
"""
