"""The commit of pre-committed output: one protocol for each family of sinks. Pure.

`protocol` is the seam that a leader sees; `of_transactions` is Kafka's, `of_stores` that of whatever store keeps a
ledger. May import `pipeline`, the vocabulary of requests, the records and the transactions.
"""
