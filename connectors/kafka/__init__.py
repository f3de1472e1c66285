"""Kafka: its source, and every request to a cluster: topics, transactions, logs, ranges of records.

`kafka_protocol` speaks the wire protocol, `client_config` holds settings and secrets; every module makes its clients
from them. `errors` has the one table of error meanings, and the one retry. `checkpoint_topic/` keeps the checkpoints of
a pipeline in Kafka. May import modules directly in `connectors`, `registry/`, and what these may import.
"""
