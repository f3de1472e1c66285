"""The input of a demonstration: records at an even pace, which last until they are told that it is enough."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from typing import Any

from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]  # its stubs hide it

from exactlyonce.pipeline.errors import ConfigError

Records = Sequence[tuple[str, dict[str, Any]]]
"""Keys, and values that become JSON."""
TAPER_S = 100.0


def create_topics(servers: str, names: Sequence[str], partitions: int) -> None:
    """Create the topics. Raises `ConfigError` if one exists already, or cannot be created."""
    admin = AdminClient({"bootstrap.servers": servers, "log_level": 3})
    for name, future in admin.create_topics([NewTopic(topic, partitions) for topic in names]).items():
        try:
            future.result()
        except KafkaException as error:
            reason = error.args[0].str()
            raise ConfigError(f"Topic {name} could not be created: {reason} The demo makes it itself.") from None


def feed(
    servers: str, topic: str, records: Records, seconds: float = 0.0, enough: threading.Event | None = None
) -> None:
    """Produce *records* at an even pace; until *enough* is set, the last tenth of them ever more slowly.

    So the input lasts until the last kill, however slow the machine is.
    """
    safe = {"enable.idempotence": True, "max.in.flight": 1}
    producer = Producer({"bootstrap.servers": servers, **safe, "linger.ms": 10, "log_level": 3})
    began, total = time.monotonic(), len(records)
    for number, (key, value) in enumerate(records):
        while len(producer) > 50_000:
            producer.poll(0.1)
        producer.produce(topic, json.dumps(value), key)
        if number % 200 == 0:
            producer.poll(0)
            ahead = began + seconds * number / total - time.monotonic()
            if ahead > 0:
                time.sleep(ahead)  # the pace of the input is the point
        if enough is not None and number > total * 0.9:
            producer.poll(0)
            enough.wait(TAPER_S / (total - number))  # until it is set
    producer.flush()


class Feeder(threading.Thread):
    """Feeds in the background."""

    def __init__(self, servers: str, topic: str, records: Records, seconds: float) -> None:
        super().__init__(daemon=True)
        self.enough, self.done = threading.Event(), threading.Event()
        self._given = servers, topic, records, seconds

    def run(self) -> None:
        feed(*self._given, self.enough)
        self.done.set()
