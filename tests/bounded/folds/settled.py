"""Waits for what brokers do after their answer: an end of a transaction is answered before its markers are written."""

from __future__ import annotations

import time
from contextlib import closing
from functools import partial

from waiting import until

from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster

PAUSE_S = 0.02


def ended_transactions(kafka: KafkaCluster, prefix: str) -> dict[str, str]:
    """The states of transactions by transactional id, once the broker has ended all that it was asked to end."""
    deadline = time.monotonic() + LIMIT_S
    with closing(Transactions(ClientConfig({"bootstrap.servers": kafka.bootstrap_servers}))) as transactions:
        while True:
            states = {each.transactional_id: each.state for each in transactions.list(prefix)}
            if not any(state.startswith("Prepare") for state in states.values()):
                return states
            assert time.monotonic() < deadline, states
            time.sleep(PAUSE_S)  # the broker has no event to wait for


def await_readable(kafka: KafkaCluster, *names: str) -> None:
    """Return once read_committed readers get to the ends of these topics, in which nothing is open."""
    with closing(Topics(ClientConfig({"bootstrap.servers": kafka.bootstrap_servers}))) as topics:
        for name in names:
            until(partial(is_readable, topics, name), told=lambda: "a transaction is open", pause_s=PAUSE_S)


def is_readable(topics: Topics, name: str) -> bool:
    return topics.end_offsets(name, committed=True) == topics.end_offsets(name, committed=False)
