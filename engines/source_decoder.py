"""From messages to records, as a source says."""

from __future__ import annotations

import sys
from collections.abc import Callable
from operator import length_hint
from typing import Any

from confluent_kafka import Message

from exactlyonce.connectors.kafka_source import KafkaSource
from exactlyonce.engines.operators import Batch
from exactlyonce.pipeline.errors import RecordError
from exactlyonce.pipeline.records import Record


class SourceDecoder:
    """Decodes for the source with *id*, and counts what it skips."""

    def __init__(self, id: str, source: KafkaSource[Any]) -> None:
        self.id = id
        self.source = source
        self.skipped = 0
        self._decode_value = source.decode_value
        self._decode: Callable[[Any], Any] = self._record if source.metadata else self._decode_value

    def decode(self, messages: list[Message]) -> Batch:
        """The batch of *messages*; one that does not decode is an error or is passed over, as the source says."""
        values = messages if self.source.metadata else list(map(Message.value, messages))
        iterator = iter(values)
        try:
            return Batch(list(map(self._decode, iterator)), messages)
        except Exception as error:
            bad = len(values) - length_hint(iterator) - 1
            problem = self._undecodable(messages[bad], error)
            if self.source.on_error == "fail":
                raise RecordError(
                    f"{problem} The job has stopped before it; nothing is lost. Mend the type or the producer, or let "
                    f'the source pass over such records: on_error="skip".'
                ) from error
            self.skipped += 1
            sys.stderr.write(f"skipped: {problem}\n")
            rest = messages[:bad] + messages[bad + 1 :]
            return self.decode(rest) if rest else Batch([], [])

    def _undecodable(self, message: Message, error: Exception) -> str:
        place = f"{message.topic()}[{message.partition()}] offset {message.offset()}"
        return f"Source {self.id!r}: the record at {place}: {self.source.value_problem(message.value(), error)}."

    def _record(self, message: Message) -> Record[Any]:
        """A message with all that Kafka knows of it."""
        return Record(
            self._decode_value(message.value()),
            self.source.decode_key(message.key()),
            message.timestamp()[1],
            tuple(message.headers() or ()),  # type: ignore[arg-type]  # a consumed message has pairs of text and bytes
            message.topic() or "",
            message.partition() or 0,
            message.offset() or 0,
        )
