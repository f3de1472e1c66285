"""The mailbox of a pipeline: requests to its running coordinator, from any machine that reaches the cluster.

It is the metadata of an offset of the pipeline's consumer group in its checkpoint topic. A request is no decision, and
nothing relies on it: it is for one incarnation alone, a newer request replaces it, and it may be lost. The sender looks
for the answer in the decision log, and asks again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from exactlyonce.checkpoint.decision_log import DECISIONS
from exactlyonce.connectors.confluent import make_consumer
from exactlyonce.connectors.kafka.errors import explained
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.names import checkpoint_topic

SAVEPOINT, DELETE, CANCEL = "savepoint", "delete", "cancel"
TIMEOUT_S = 10.0
_HAS_MEMBERS = {KafkaError.UNKNOWN_MEMBER_ID, KafkaError.ILLEGAL_GENERATION, KafkaError.REBALANCE_IN_PROGRESS}
"""The answers to a commit of offsets by a non-member, if the group has members."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    incarnation: int
    """The one it is for."""
    action: str
    stop: bool = False
    """With a savepoint: stop after it."""
    checkpoint: int = 0
    """The savepoint to delete."""


_encode = msgspec.json.Encoder().encode
_decoder = msgspec.json.Decoder(Asked)


class Mailbox:
    """The mailbox of *pipeline*; the first request connects. For one thread at a time. See `errors.explained`."""

    def __init__(self, config: Mapping[str, Any], pipeline: str) -> None:
        own = {"group.id": pipeline, "enable.auto.commit": False, "enable.auto.offset.store": False}
        self._config, self._group, self.place = config, pipeline, (checkpoint_topic(pipeline), DECISIONS)
        self._consumer = make_consumer({**config, **own})

    def look(self) -> Asked | None:
        with explained(self._config, f"looking for requests in group {self._group}"):
            (committed,) = self._consumer.committed([TopicPartition(*self.place)], timeout=TIMEOUT_S)
            if committed.error is not None:
                raise KafkaException(committed.error)
        try:
            return _decoder.decode(committed.metadata) if committed.metadata else None
        except msgspec.DecodeError:
            return None  # a newer exactlyonce asks for something that this one does not know

    def ask(self, asked: Asked) -> None:
        """Leave *asked* there, in place of the present request. `ConfigError` while the group has members."""
        note = TopicPartition(*self.place, 0, _encode(asked).decode())
        with explained(self._config, f"leaving a request in group {self._group}"):
            try:
                self._consumer.commit(offsets=[note], asynchronous=False)
            except KafkaException as error:
                if error.args[0].code() in _HAS_MEMBERS:
                    raise ConfigError(
                        f"A consumer has joined group {self._group}, which belongs to the pipeline, so the broker "
                        f"takes no request for its run. End that consumer, or give it another group.id, and ask again."
                    ) from error
                raise

    def close(self) -> None:
        self._consumer.close()
