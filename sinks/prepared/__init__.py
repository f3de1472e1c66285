"""Prepared sinks: rows wait in the store itself, in transactions that it keeps until they are committed by name.

Rows are written as they come. At a barrier the transaction is prepared, with its row in a table of prepared
transactions; the committable names it. Once the checkpoint is decided the leader commits it, and sets the ledger. A new
store is one class, a `PreparingStore`. May import what `sinks` may import.
"""
