"""Kafka: its source, and all that asks a cluster something: topics, transactions, logs, ranges of records.

`kafka_protocol` speaks the wire protocol, `client_config` knows settings and secrets; every module makes its clients
from them. `errors` has the one table of what errors mean, and the one retry. `checkpoint_topic/` holds what a pipeline
keeps of its checkpoints in Kafka. May import `checkpoint`, `state` and `pipeline`; knows no engine.
"""
