"""The operator of `Stream.map_batches`: it calls a function with Arrow batches of the records.

Invariants: a record's outputs are of one call, and are passed on once, in the order of the records. A call that fails
is repeated for each half of its records, down to those that make it fail, except during an outage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from exactlyonce.engines.runtime.batch import Batch, shown_origin
from exactlyonce.engines.runtime.faults import is_outage, record_error
from exactlyonce.engines.runtime.operators import BatchOperator
from exactlyonce.engines.runtime.order_log import Answers
from exactlyonce.pipeline.arrow import ArrowDecoder, ArrowEncoder, BatchMismatch, Decoded
from exactlyonce.pipeline.columns import columns_or_value
from exactlyonce.pipeline.errors import RecordError, Unavailable, UserError, text_of, users_errors
from exactlyonce.pipeline.graph import Node


@dataclass
class _Outputs:
    """The outputs of a batch, each with the place of the record that it stems from, and the records that failed."""

    records: list[Any] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    failed: list[tuple[int, BaseException]] = field(default_factory=list)
    one_each: bool = True
    """Whether each record has one output so far."""


@dataclass(slots=True)
class BatchMapper(BatchOperator):
    """Passes on the rows of the batches that the function returns."""

    fn: Callable[[Any], Any]
    max_rows: int
    encoder: ArrowEncoder
    decoder: ArrowDecoder
    answers: Answers
    """It says whether restarts have not helped."""

    @classmethod
    def made(cls, node: Node, function: Callable[[Any], Any], taken: Any, answers: Answers) -> BatchMapper:
        """The operator of *node*, for records of the type *taken*."""
        calls = node.batch_calls
        assert calls is not None, "the node is a MAP_BATCHES"
        encoder, decoder = ArrowEncoder(columns_or_value(taken)), ArrowDecoder(node.type, calls.schema)
        return cls(node.id, function, calls.max_rows, encoder, decoder, answers)

    def __call__(self, batch: Batch) -> None:
        outputs, count = _Outputs(), len(batch.records)
        entered_s = self.activity.enter(self.id)
        for start in range(0, count, self.max_rows):
            self._map(batch, start, min(start + self.max_rows, count), outputs)
        self.activity.leave(self.id, entered_s, count)
        self._without(batch, outputs.failed)
        if outputs.one_each and not outputs.failed:
            self.push(batch.unkeyed(outputs.records))
        elif outputs.records:
            self.push(batch.stemming(outputs.records, outputs.places))

    def _map(self, batch: Batch, start: int, end: int, outputs: _Outputs) -> None:
        """Add the outputs of the records from *start* to *end*."""
        self.activity.breathe()
        try:
            decoded = self._called(batch.records[start:end])
        except users_errors() as error:
            if isinstance(error, UserError) and not isinstance(error, Unavailable):
                raise
            if end - start > 1 and (not is_outage(error) or self.answers.asks_alone):
                self._halve(batch, start, end, outputs, error)
            elif self.survives(error):
                outputs.failed.append((start, error))
            else:
                raise self._failure(batch, start, end, error) from error
            return
        outputs.records += decoded.records
        if decoded.rows is None:
            outputs.places += range(start, end)
        else:
            outputs.one_each = False
            outputs.places += [start + row for row in decoded.rows]

    def _halve(self, batch: Batch, start: int, end: int, outputs: _Outputs, error: BaseException) -> None:
        """Map each half, where all together made *error*. No half need fail: a batch may be too large for memory. But
        one that comes out otherwise is no function of the records."""
        failed, middle = len(outputs.failed), (start + end) // 2
        self._map(batch, start, middle, outputs)
        self._map(batch, middle, end, outputs)
        if isinstance(error, BatchMismatch) and len(outputs.failed) == failed:
            raise self._failure(batch, start, end, error) from error

    def _called(self, records: list[Any]) -> Decoded:
        returned = self.fn(self.encoder.encode(records))
        try:
            return self.decoder.decode(returned, len(records))
        except (TypeError, ValueError) as error:
            raise BatchMismatch(f"a value that is not of its type: {error}") from None

    def _failure(self, batch: Batch, start: int, end: int, error: BaseException) -> RecordError | Unavailable:
        """The *error* of a call for the records from *start* to *end*."""
        origin, count = batch.origins[start], end - start
        call = f"a call for {count} records, of which {shown_origin(origin)} is the first"
        if isinstance(error, BatchMismatch):
            what = f"gave another batch than schema= says: {text_of(error)}"
            if count == 1:
                return self.misuse(origin, what)
            return self.misuse(
                None, what, f"{call}. No half of it alone is wrong: the rows of a record depend on others"
            )
        if count > 1:
            return record_error(f"Operator {self.id!r}", self.id, None, error, on=call)
        return self.error(origin, error)
