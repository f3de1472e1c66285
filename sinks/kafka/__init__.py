"""The Kafka sink: its description, the writer of one subtask, and the pool of its transactional ids.

The writer pre-commits; the protocol commits (`checkpoint.transactions`). May import what `sinks` may import.
"""
