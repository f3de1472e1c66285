"""The consumer of readers that share no code with the engine."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from confluent_kafka import Consumer


def plain_consumer(servers: str, settings: Mapping[str, Any] = MappingProxyType({})) -> Consumer:
    """A consumer of committed records, if *settings* do not say otherwise, which is to be assigned its partitions."""
    return Consumer({
        "bootstrap.servers": servers, "group.id": "plain", "isolation.level": "read_committed", "log_level": 0,
        "enable.auto.commit": False, "auto.offset.reset": "error", **settings,
    })  # fmt: skip
