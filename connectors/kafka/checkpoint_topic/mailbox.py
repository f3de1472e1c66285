"""The mailbox of a pipeline: what people ask of its running coordinator, from any machine that reaches the cluster.

It is the metadata of an offset that the group of the pipeline's name has in its checkpoint topic: a place that the
coordinator may write to anyhow, that no reader of the log ever sees, and that older coordinators do not look at. A
request is no decision, and nothing relies on it: it is for one incarnation alone and void in every other, there is one
at a time, and it may be lost. Whoever asks looks for the answer in the decision log, and asks again.
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
"""What a broker answers to whoever commits offsets of a group without being one of its members, if it has any."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """One request."""

    id: str
    incarnation: int
    """Whom it is for."""
    action: str
    stop: bool = False
    """With a savepoint: stop behind it."""
    checkpoint: int = 0
    """The savepoint to delete."""


_encode = msgspec.json.Encoder().encode
_decoder = msgspec.json.Decoder(Asked)


class Mailbox:
    """Of *pipeline*; the first question connects. For one thread at a time.

    Its questions raise what `errors.explained` makes of an error.
    """

    def __init__(self, config: Mapping[str, Any], pipeline: str) -> None:
        own = {"group.id": pipeline, "enable.auto.commit": False, "enable.auto.offset.store": False}
        self._config, self._group, self.place = config, pipeline, (checkpoint_topic(pipeline), DECISIONS)
        self._consumer = make_consumer({**config, **own})

    def look(self) -> Asked | None:
        """The present request."""
        with explained(self._config, f"looking for requests in group {self._group}"):
            (found,) = self._consumer.committed([TopicPartition(*self.place)], timeout=TIMEOUT_S)
            if found.error is not None:
                raise KafkaException(found.error)
        try:
            return _decoder.decode(found.metadata) if found.metadata else None
        except msgspec.DecodeError:
            return None  # a newer exactlyonce asks for something that this one does not know

    def ask(self, asked: Asked) -> None:
        """Leave *asked* there, instead of whatever is there. `ConfigError` while the group has members."""
        note = TopicPartition(*self.place, 0, _encode(asked).decode())
        with explained(self._config, f"leaving a request in group {self._group}"):
            try:
                self._consumer.commit(offsets=[note], asynchronous=False)
            except KafkaException as error:
                if error.args[0].code() in _HAS_MEMBERS:
                    raise ConfigError(
                        f"A consumer is in group {self._group}, which is the pipeline's own, so that the broker takes "
                        f"no request for its run. End that consumer, or give it another group.id, and ask again."
                    ) from error
                raise

    def close(self) -> None:
        """Let go of the connection."""
        self._consumer.close()
