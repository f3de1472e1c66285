"""The factory of all clients of confluent-kafka, which keeps librdkafka's lines off stderr.

They go to the logger `exactlyonce.kafka` whenever a client is polled; add a handler to see them. `debug` or `log_level`
in the settings ask for librdkafka's own lines on stderr. Errors are raised as well, and never only logged.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from confluent_kafka import Consumer, Producer

LOGGER = logging.getLogger("exactlyonce.kafka")
LOGGER.addHandler(logging.NullHandler())

QUEUE_KILOBYTES = 65_536
"""The default queue of a producer: a worker has several, and the library's own default is 1 GB each."""

IN_FLIGHT_MAX = 1
"""The produce requests of a producer that a broker may have at a time.

With more, librdkafka (2.16) loses records in silence. A broker that is becoming the leader of a partition may refuse
the first request ("not leader") and take the second: it has no state of this producer yet, and accepts any sequence
number. librdkafka then reports the records of the first as delivered, without an offset (confluent-kafka-go #921).
"""

RECONNECT_BACKOFF_MS = 20
"""The default. Half of it passes before the first connection: a client is ready in 15 ms, and with the library's own
default in 55."""

NOW, ANY_PARTITION = 0, -1
"""In `produce`: the timestamp and the partition that the client chooses itself."""

_ASKED_FOR = ("debug", "log_level")


class WeakProducer(Producer):
    """A producer that its own callbacks may hold by `weakref.ref`.

    With a strong reference, its 4 threads and 8 descriptors would live until Python's collector runs.
    """


def make_producer(settings: Mapping[str, Any]) -> Producer:
    """A producer with *settings*, but one request in flight. `produce` raises BufferError while the queue is full."""
    in_flight = {"max.in.flight.requests.per.connection": IN_FLIGHT_MAX}
    return WeakProducer({"queue.buffering.max.kbytes": QUEUE_KILOBYTES, **_completed(settings), **in_flight})


def make_consumer(settings: Mapping[str, Any]) -> Consumer:
    return Consumer(_completed(settings))


def _completed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """*settings* with the defaults of all clients."""
    quiet = {} if any(name in settings for name in _ASKED_FOR) else {"logger": LOGGER}
    return {"reconnect.backoff.ms": RECONNECT_BACKOFF_MS, **quiet, **settings}
