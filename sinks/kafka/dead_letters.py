"""``on_error=DeadLetters("orders-dead")``: a topic for records that could not be processed, and its limits."""

from __future__ import annotations

from dataclasses import dataclass

from exactlyonce.pipeline.codec import BytesCodec
from exactlyonce.pipeline.dead_letters import DeadLetter, DeadLetterLimits, DeadLetterTarget
from exactlyonce.sinks.kafka.sink import KafkaSink


@dataclass(frozen=True, init=False)
class DeadLetters(DeadLetterTarget):
    """Writes records that cannot be processed to a topic, in the same checkpoint as the outputs of the others.

    Give it as ``on_error=`` to a source, an operator or a sink; several may have the same topic.

    - *max_per_checkpoint*: the number of dead letters of that source, operator or sink in one checkpoint, from 0 on.
      With more the pipeline stops before the checkpoint, so that none of these is written; None: no limit.
    - *max_share*: the same as a share of the checkpoint's input records, from 0 to 1. One letter is never too many.
    - *create_partitions*: the partition count with which a missing topic is created; None makes that an error.
    """

    topic: str
    limits: DeadLetterLimits
    create_partitions: int | None

    def __init__(
        self,
        topic: str,
        *,
        max_per_checkpoint: int | None = None,
        max_share: float | None = None,
        create_partitions: int | None = 4,
    ) -> None:
        object.__setattr__(self, "topic", topic)
        object.__setattr__(self, "limits", DeadLetterLimits(max_per_checkpoint, max_share))
        object.__setattr__(self, "create_partitions", create_partitions)

    def sink(self) -> KafkaSink[DeadLetter]:
        return KafkaSink(self.topic, value=BytesCodec(), create_partitions=self.create_partitions)
