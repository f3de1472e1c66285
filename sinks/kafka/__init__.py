"""The Kafka sink: its description, the writer of one subtask with its transactional ids, and an open transaction.

The writer pre-commits; the protocol commits (`checkpoint.transactions`). May import what `sinks` may import.
"""
