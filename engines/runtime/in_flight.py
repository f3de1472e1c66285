"""In-flight records at a snapshot, in blocks: those that a barrier has overtaken, and those that went round loops.

    log   = frames end to end: bytes of the channel's name (2), of the frame (4), both big-endian, name, frame
    block = zlib(a piece of the log, `PIECE_BYTES` long but for the last)
            its envelope has the record schema of each loop as JSON; "frames" in old blocks, or without loops
    list  = msgpack array of references to such blocks, `LISTED_MAX` but for the last; a block too
    frame = a batch as `engines.runtime.batch` encodes it;  channel's name = edge, ":", the sender's subtask

A manifest, one record, names the blocks of a log or, if these are more than `NAMED_MAX`, lists of them.

Invariants: a subtask's log holds its frames in the order in which they go before anything else that it takes. The log
of a key's owner has the key's records in order; the owner after a restore takes them in that order. Together, the
subtasks of any parallelism take every record once. Records of a loop have no key: the whole log of a subtask goes to
one subtask, that of its number if there is one. See docs/design/unaligned-checkpoints.md.
"""

from __future__ import annotations

import struct
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from exactlyonce.checkpoint.block_storage import Blocks
from exactlyonce.checkpoint.records.manifest import BlockRef, ChannelLog, Manifest, RecordPlace
from exactlyonce.engines.plan import LOOP_MARK, ShuffleEdge, feedback_edges
from exactlyonce.engines.runtime.batch import BatchCodec, is_same, records_in
from exactlyonce.pipeline import shape
from exactlyonce.pipeline.errors import GraphError, RecordError
from exactlyonce.pipeline.graph import Input, LogicalGraph
from exactlyonce.pipeline.records import wire_schema
from exactlyonce.pipeline.schema_evolution import lost, unfit
from exactlyonce.state.errors import DamagedState
from exactlyonce.state.key_groups import common_groups, group_range

PIECE_BYTES = 768 * 1024
"""A block stays below its limit even if nothing can be compressed."""
SLICE_FRAMES = 64
NAMED_MAX = 4
LISTED_MAX = 4_000
_HEADER = struct.Struct(">HI")
_encode_list = msgspec.msgpack.Encoder().encode
_decode_list = msgspec.msgpack.Decoder(list[BlockRef]).decode


FRAMES = "frames"


def record_schemas(schemas: Mapping[str, Any]) -> str:
    """The schema text of a block, from the schemas of loops.

    >>> record_schemas({"retry": "int"}), record_schemas({})
    ('{"retry":"int"}', 'frames')
    """
    return msgspec.json.encode(schemas, order="deterministic").decode() if schemas else FRAMES


class InFlightFrame(NamedTuple):
    """A frame that came on *channel* and was not taken."""

    channel: str
    frame: bytes

    @property
    def edge(self) -> str:
        return edge_of(self.channel)

    @property
    def loop(self) -> str:
        """The loop that it went round; empty if it was in a shuffle."""
        return loop_of(self.channel)


def edge_of(channel: str) -> str:
    return channel.rpartition(":")[0]


def loop_of(channel: str) -> str:
    """The loop of *channel*; empty if it is one of a shuffle."""
    edge = edge_of(channel)
    return edge.removeprefix(LOOP_MARK) if edge.startswith(LOOP_MARK) else ""


def encode(frames: Iterable[InFlightFrame]) -> Iterator[bytes | None]:
    """The bodies of blocks, in order; None now and then, after work that filled no block."""
    piece = bytearray()
    for number, (channel, frame) in enumerate(frames, 1):
        name = channel.encode()
        piece += _HEADER.pack(len(name), len(frame)) + name + frame
        while len(piece) >= PIECE_BYTES:
            yield zlib.compress(memoryview(piece)[:PIECE_BYTES].tobytes(), 1)
            del piece[:PIECE_BYTES]
        if number % SLICE_FRAMES == 0:
            yield None
    if piece:
        yield zlib.compress(piece, 1)


def decode(bodies: Iterable[bytes]) -> Iterator[InFlightFrame]:
    """The frames of a log. Raises `DamagedState` for other bytes."""
    rest = bytearray()
    for body in bodies:
        unpack = zlib.decompressobj()
        try:
            rest += unpack.decompress(body, PIECE_BYTES)
        except zlib.error as error:
            raise DamagedState(f"Records on their way cannot be read: {error}.") from error
        begin = 0
        while len(rest) - begin >= _HEADER.size:
            name, size = _HEADER.unpack_from(rest, begin)
            middle = begin + _HEADER.size + name
            if len(rest) < middle + size:
                break
            channel = bytes(rest[begin + _HEADER.size : middle]).decode()
            yield InFlightFrame(channel, bytes(rest[middle : middle + size]))
            begin = middle + size
        del rest[:begin]
    if rest:
        raise DamagedState(f"Records on their way cannot be read: {len(rest)} bytes are left over.")


def lists_of(blocks: Sequence[BlockRef]) -> list[bytes]:
    """The lists that a manifest names instead of *blocks*; none: it names the blocks."""
    starts = range(0, len(blocks), LISTED_MAX) if len(blocks) > NAMED_MAX else ()
    return [_encode_list(blocks[start : start + LISTED_MAX]) for start in starts]


def listed_in(body: bytes) -> list[BlockRef]:
    return _decode_list(body)


def blocks_of(log: ChannelLog, reader: Blocks) -> list[BlockRef]:
    """The blocks of *log*, in order. Raises `DamagedBlock`."""
    if not log.indexed:
        return [*log.blocks]
    lists = _bodies(log.blocks, reader)
    return [ref for block in log.blocks for ref in listed_in(lists[block])]


def frames_of(log: ChannelLog, reader: Blocks) -> Iterator[InFlightFrame]:
    """The frames of *log*. Raises `DamagedBlock` or `DamagedState`."""
    refs = blocks_of(log, reader)
    bodies = _bodies(refs, reader)
    return decode(bodies[ref] for ref in refs)


def loop_schemas(log: ChannelLog, reader: Blocks) -> dict[str, Any]:
    """The schemas of loop records in *log*, as far as its blocks have them. Raises likewise."""
    for _, block in reader.fetch(blocks_of(log, reader)[:1]):
        if block.schema != FRAMES:
            return msgspec.json.decode(block.schema, type=dict[str, Any])
    return {}


def misfit(written: Any, type_: Any) -> str:
    """Why records of schema *written* would change as *type_*, as far as schemas tell; else empty.

    >>> misfit({"list": "int"}, set[int])
    'set[int] (its items that occur more than once) would be lost'
    """
    now, name = wire_schema(type_), shape.type_name(type_)
    if written == now:
        return ""
    if gone := lost(written, now, name):
        return f"{', '.join(gone)} would be lost"
    return "; ".join(unfit(written, now, name))


def _bodies(refs: Iterable[BlockRef], reader: Blocks) -> dict[BlockRef, bytes]:
    return {ref: block.body for ref, block in reader.fetch(refs)}


def restored(
    manifest: Manifest,
    graph: LogicalGraph,
    subtask: int,
    parallelism: int,
    reader: Blocks,
    skips: Sequence[RecordPlace] = (),
) -> list[InFlightFrame]:
    """The in-flight records that *subtask* of *parallelism*, of all tasks, takes first, in order, without those of
    *skips*.

    Downstream records go first, for they were sent first. Records of loops come last: no barrier waits for them.
    """
    if not manifest.channel_logs:
        return []
    groups, places, codecs = graph.max_parallelism, dict[str, int](), dict[str, BatchCodec]()
    for edge in graph.shuffles:
        name = ShuffleEdge.of(edge).name
        places[name] = graph.nodes.index(graph.node(edge.stateful))
        codecs[name] = BatchCodec(graph.type_of(Input(edge.key_by)))
    loops = {edge.name: graph.nodes.index(graph.node(edge.loop)) for edge in feedback_edges(graph)}
    places |= loops
    same = graph.fingerprint() == manifest.fingerprint
    frames: list[InFlightFrame] = []
    for log in sorted(manifest.channel_logs, key=lambda log: (log.subtask, log.task)):
        before = group_range(log.subtask, manifest.parallelism, groups)
        common = common_groups(before, group_range(subtask, parallelism, groups))
        is_ours = (bool(loops) or not same) and log.subtask % parallelism == subtask
        schemas = loop_schemas(log, reader) if is_ours and not same else {}
        misfits = {loop.id: misfit(schemas[loop.id], loop.type) for loop in graph.loops if loop.id in schemas}
        for frame in frames_of(log, reader) if common or is_ours else ():
            ours: bytes | None = None
            if frame.edge in loops:
                ours = frame.frame if is_ours else None
                if ours is not None and not same:
                    _require_kept(BatchCodec(graph.node(frame.loop).type), frame, manifest, misfits.get(frame.loop))
            elif not same:
                raise _has_no_place(frame, manifest)
            elif common:
                ours = frame.frame if common == before else codecs[frame.edge].of_groups(frame.frame, common, groups)
            if ours is not None and skips:
                codec = codecs[frame.edge] if frame.edge in codecs else BatchCodec(graph.node(frame.loop).type)
                ours = codec.without(ours, skips)
            if ours is not None:
                frames.append(InFlightFrame(frame.channel, ours))
    return sorted(frames, key=lambda frame: (frame.edge in loops, -places[frame.edge]))


def _require_kept(codec: BatchCodec, frame: InFlightFrame, manifest: Manifest, why: str | None) -> None:
    """Raise unless the records of *frame* fit the loop's present type without loss. *why* they do not, by `misfit`;
    None: the log has no schema, so that only the values tell."""
    try:
        again = codec.decode(frame.frame)
        if why is None:
            why = "" if is_same(frame.frame, codec.encode(again)) else "they would not be what they were"
    except RecordError:
        why = why or "they are not valid as that"
    if why:
        raise GraphError(
            f"Checkpoint {manifest.checkpoint} of {manifest.pipeline!r} holds records that went round loop "
            f"{frame.loop!r}, written as another type than it has now: {why}. Give the loop its old type; or run the "
            f"pipeline as it was with --until latest, which ends once nothing goes round."
        )


def _has_no_place(frame: InFlightFrame, manifest: Manifest) -> GraphError:
    checkpoint = f"Checkpoint {manifest.checkpoint} of {manifest.pipeline!r}"
    if frame.loop:
        return GraphError(
            f"{checkpoint} holds records that went round loop {frame.loop!r}, which the pipeline has no longer. Give "
            f"it a loop of this id again; or run it as it was with --until latest, which ends once nothing goes round."
        )
    return GraphError(
        f"{checkpoint} is unaligned: it holds records that were on their way between operators, and the graph is "
        f"another one now, in which they may have no place. Run the pipeline as it was once more, and let it end "
        f"cleanly (`exactlyonce run ... --until latest`, or stop it): its last checkpoint is aligned, and any graph "
        f"may go on from there."
    )


def records_by_channel(frames: Iterable[InFlightFrame]) -> dict[str, int]:
    """The number of in-flight records of each channel."""
    counts: Counter[str] = Counter()
    for channel, frame in frames:
        counts[channel] += records_in(frame)
    return dict(counts)
