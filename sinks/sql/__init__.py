"""Tables as sinks, whatever the database: the description, and the store with its ledger.

`fields` is pure: the fields of a record's type. `table` has the description and the columns. A database is a dialect:
it derives from `table.TableSink` and `store.SqlStore`, and has a `ledger.Session`. Opens nothing, and knows no driver.
May import what `sinks` may import.
"""
