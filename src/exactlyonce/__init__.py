"""Exactly-once pipelines between Kafka and other stores, in Python."""
