"""Records that went round the loops of a pipeline at a savepoint, one by one: nothing here knows the graph of a frame.

Invariants: of a loop and a subtask, records keep their order; those of a subtask stay together at any parallelism, as
they do at a restart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any, NamedTuple

import msgspec

from exactlyonce.checkpoint.block_storage import Blocks
from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.engines.plan import LOOP_MARK
from exactlyonce.engines.runtime import in_flight
from exactlyonce.engines.runtime.batch import Batch
from exactlyonce.engines.runtime.batch_codec import BatchCodec, Coordinates, is_same, records_in
from exactlyonce.engines.runtime.in_flight import InFlightFrame, frames_of
from exactlyonce.pipeline.errors import GraphError
from exactlyonce.pipeline.schema import type_name
from exactlyonce.pipeline.wire import wire_of

FRAME_RECORDS = 500
_RAW = BatchCodec(msgspec.Raw)


class LoopEntry(NamedTuple):
    """A record that was to come round."""

    subtask: int
    record: bytes
    """As msgpack."""
    topic: str
    partition: int
    offset: int
    """Of the message that it stems from."""


def records_by_loop(manifest: Manifest, blocks: Blocks) -> tuple[Counter[str], int]:
    """How many records went round each loop at the checkpoint of *manifest*, and how many a barrier had overtaken."""
    found, elsewhere = Counter[str](), 0
    for _, each in _frames(manifest, blocks):
        if each.loop:
            found[each.loop] += records_in(each.frame)
        else:
            elsewhere += records_in(each.frame)
    return found, elsewhere


def entries_of(manifest: Manifest, blocks: Blocks, loop: str) -> Iterator[LoopEntry]:
    """All records that went round *loop*. Raises what says which block is damaged."""
    for subtask, each in _frames(manifest, blocks):
        if each.loop == loop:
            batch = _RAW.decode(each.frame)
            for record, origin in zip(batch.records, batch.origins, strict=True):
                where = (origin.topic() or "", origin.partition() or 0, origin.offset() or 0)
                yield LoopEntry(subtask, bytes(record), *where)


def _frames(manifest: Manifest, blocks: Blocks) -> Iterator[tuple[int, InFlightFrame]]:
    for log in sorted(manifest.channel_logs, key=lambda each: (each.subtask, each.task)):
        for each in frames_of(log, blocks):
            yield log.subtask, each


def frames_of_loop(loop: str, entries: Iterable[LoopEntry], parallelism: int) -> Iterator[tuple[int, InFlightFrame]]:
    """*entries* as what the subtasks of *parallelism* take first; -> the subtask, and a frame of it."""
    for old, same in groupby(entries, lambda each: each.subtask):
        subtask, records = old % parallelism, list(same)
        for first in range(0, len(records), FRAME_RECORDS):
            some = records[first : first + FRAME_RECORDS]
            origins = [Coordinates(each.topic, each.partition, each.offset) for each in some]
            batch = Batch([msgspec.Raw(each.record) for each in some], origins, None)
            yield subtask, InFlightFrame(f"{LOOP_MARK}{loop}:{subtask}", _RAW.encode(batch))


def schemas_of(manifest: Manifest, blocks: Blocks) -> dict[str, Any]:
    """By loop, the schema of what went round it at the checkpoint of *manifest*, as far as that is known."""
    return next((in_flight.loop_schemas(log, blocks) for log in manifest.channel_logs if log.records), {})


def require_same(loop: str, type_: Any, entries: Iterable[LoopEntry], savepoint: str, written: Any = None) -> None:
    """Raise `GraphError` unless *entries* are of *type_*, which the loop has now, without loss: by their schema, which
    is *written*, and as they are read; without one by their values alone, which do not tell what they leave out."""
    decode, encode = msgspec.msgpack.Decoder(wire_of(type_).type).decode, msgspec.msgpack.Encoder().encode
    misfit = in_flight.misfit(written, type_) if written is not None else ""
    for each in entries:
        why = misfit or "it would not be what it was"
        try:
            again = decode(each.record)
            if not misfit and (written is not None or is_same(each.record, encode(again))):
                continue
        except msgspec.ValidationError as error:
            why = misfit or str(error)
        raise GraphError(
            f"The {savepoint} holds records that went round loop {loop!r}, written as another type than "
            f"{type_name(type_)}, which it has now: {why} (that of {each.topic}[{each.partition}] offset "
            f"{each.offset}). Give the loop its old type; or run the pipeline as it was with --until latest, which "
            f"ends once nothing goes round, and take the savepoint then."
        )
