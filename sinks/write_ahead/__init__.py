"""Write-ahead sinks: rows wait in the checkpoint topic, and come into the store with the ledger, in one transaction.

At a barrier the rows of an interval are blocks of the checkpoint topic; the committable names them. Once the checkpoint
is decided, the leader applies them to the store, in one transaction with the ledger entry. A new store is one class, a
`Store`. May import what `sinks` may import.
"""
