"""The one place that makes clients of confluent-kafka, so that librdkafka writes nothing to stderr unasked.

librdkafka's lines go to the logger `exactlyonce.kafka` whenever the client is polled; a program that wants to see them
gives that logger a handler. `debug` or `log_level` in the settings ask for librdkafka's own lines on stderr. Nothing
that matters is left to these lines: errors are raised, and a source that waits for its broker says so.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from confluent_kafka import Consumer, Producer

LOGGER = logging.getLogger("exactlyonce.kafka")
LOGGER.addHandler(logging.NullHandler())

QUEUE_KILOBYTES = 65_536
"""What a producer holds at most, unless told otherwise: there are several in a worker, and the library's own default
is 1 GB each."""

_ASKED_FOR = ("debug", "log_level")


class WeakProducer(Producer):
    """A producer that its own callbacks may refer to by `weakref.ref`.

    A callback that holds its producer keeps it alive, with 4 threads and 8 descriptors, until Python's collector comes.
    """


def make_producer(settings: Mapping[str, Any]) -> Producer:
    """A producer with *settings*. `produce` raises BufferError while it holds all that it may."""
    return WeakProducer({"queue.buffering.max.kbytes": QUEUE_KILOBYTES, **_logged(settings, {"logger": LOGGER})})


def make_consumer(settings: Mapping[str, Any]) -> Consumer:
    """A consumer with *settings*."""
    return Consumer(_logged(settings, {"logger": LOGGER}))


def _logged(settings: Mapping[str, Any], quiet: Mapping[str, Any]) -> dict[str, Any]:
    return {**settings} if any(name in settings for name in _ASKED_FOR) else {**quiet, **settings}
