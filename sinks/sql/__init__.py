"""Tables as sinks, whatever the database: the description, the store with its ledger, and prepared transactions.

`fields` and `table` are pure: the fields of a record's type, and the columns of a table. A database is a dialect: it
derives from `sink.TableSink`, `store.SqlStore` and `prepared.PreparingSqlStore`, and has a `ledger.Session`. Opens
nothing, and knows no driver. May import what `sinks` may import.
"""
