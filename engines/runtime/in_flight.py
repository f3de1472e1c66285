"""Records on their way at a snapshot, in blocks: what a barrier has overtaken, and what went round loops.

    log   = frames end to end: bytes of the channel's name (2), of the frame (4), both big-endian, name, frame
    block = zlib(a piece of the log, `PIECE_BYTES` long but for the last)
            its envelope says, as JSON, the schema of the records of each loop of the pipeline; older ones "frames"
    list  = msgpack array of references to such blocks, `LISTED_MAX` but for the last; a block too
    frame = a batch as `engines.runtime.batch_codec` encodes it;  channel's name = edge, ":", the sender's subtask

A manifest names the blocks of a log, or, where these are more than `NAMED_MAX`, the lists that have them: a loop may
have as much on its way as memory takes, and a manifest is one record.

A subtask's log holds its frames in the order in which they go before anything else that it takes. Invariants: of a key,
the log of the subtask that owned it has the records in their order; whoever owns the key after a restore takes them in
that order, before any that is read or sent later; all together, the subtasks of a parallelism take every record once.
What went round a loop has no key: a subtask's goes whole to one subtask, the one of its number where there is one.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from exactlyonce.checkpoint.block_storage import Blocks
from exactlyonce.checkpoint.records.manifest import BlockRef, ChannelLog, Manifest, RecordPlace
from exactlyonce.engines.plan import LOOP_MARK, ShuffleEdge, feedback_edges
from exactlyonce.engines.runtime.batch_codec import BatchCodec, is_same, records_in
from exactlyonce.pipeline import schema, wire
from exactlyonce.pipeline.errors import GraphError, RecordError
from exactlyonce.pipeline.graph import Input, LogicalGraph
from exactlyonce.pipeline.schema_evolution import lost, unfit
from exactlyonce.state.errors import DamagedState
from exactlyonce.state.key_groups import common_groups, group_range

PIECE_BYTES = 768 * 1024
"""So that a block stays below its limit even where nothing can be compressed."""
SLICE_FRAMES = 64
NAMED_MAX = 4
LISTED_MAX = 4_000
_HEADER = struct.Struct(">HI")
_encode_list = msgspec.msgpack.Encoder().encode
_decode_list = msgspec.msgpack.Decoder(list[BlockRef]).decode


FRAMES = "frames"
"""What blocks say of their records where the pipeline has no loops, or was written before they said any more."""


def said_of_records(schemas: Mapping[str, Any]) -> str:
    """What blocks say of the records of loops; *schemas* are theirs, by loop.

    >>> said_of_records({"retry": "int"}), said_of_records({})
    ('{"retry":"int"}', 'frames')
    """
    return msgspec.json.encode(schemas, order="deterministic").decode() if schemas else FRAMES


class InFlightFrame(NamedTuple):
    """A frame that came on *channel* and was not taken yet."""

    channel: str
    frame: bytes

    @property
    def edge(self) -> str:
        """Of the channel."""
        return edge_of(self.channel)

    @property
    def loop(self) -> str:
        """The loop that it went round; empty where it was on its way in a shuffle."""
        return loop_of(self.channel)


def edge_of(channel: str) -> str:
    """The edge that *channel* is one of."""
    return channel.rpartition(":")[0]


def loop_of(channel: str) -> str:
    """The loop that *channel* closes; empty for one of a shuffle."""
    edge = edge_of(channel)
    return edge.removeprefix(LOOP_MARK) if edge.startswith(LOOP_MARK) else ""


def encode(frames: Iterable[InFlightFrame]) -> Iterator[bytes | None]:
    """The blocks' bodies, in order; None now and then, where work is done and no block is full."""
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
    """The frames of a log. Raises `DamagedState` for bytes that are none."""
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
    """The lists that a manifest names in the place of *blocks*; none: it names these themselves."""
    starts = range(0, len(blocks), LISTED_MAX) if len(blocks) > NAMED_MAX else ()
    return [_encode_list(blocks[start : start + LISTED_MAX]) for start in starts]


def listed_in(body: bytes) -> list[BlockRef]:
    """The blocks that a list has, in their order."""
    return _decode_list(body)


def blocks_of(log: ChannelLog, reader: Blocks) -> list[BlockRef]:
    """The blocks that have what is on its way, in their order. Raises `DamagedBlock`."""
    if not log.indexed:
        return [*log.blocks]
    lists = _bodies(log.blocks, reader)
    return [ref for each in log.blocks for ref in listed_in(lists[each])]


def frames_of(log: ChannelLog, reader: Blocks) -> Iterator[InFlightFrame]:
    """The frames of *log*. Raises `DamagedBlock` or `DamagedState` where they are not what was written."""
    refs = blocks_of(log, reader)
    bodies = _bodies(refs, reader)
    return decode(bodies[ref] for ref in refs)


def loop_schemas(log: ChannelLog, reader: Blocks) -> dict[str, Any]:
    """By loop, the schema of its records in *log*, as far as that says it. Raises likewise."""
    for _, block in reader.fetch(blocks_of(log, reader)[:1]):
        if block.schema != FRAMES:
            return msgspec.json.decode(block.schema, type=dict[str, Any])
    return {}


def misfit(written: Any, type_: Any) -> str:
    """Why records of schema *written* would not be what they were as *type_*, as far as the schemas tell; else empty.

    >>> misfit({"list": "int"}, set[int])
    'set[int] (its items that are there more than once) would be lost'
    """
    now, name = wire.describe(type_), schema.type_name(type_)
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
    """What *subtask* of *parallelism*, of whichever task, takes before anything else, in this order: without what stems
    from the records of the inputs to be left out, *skips*.

    Where streams are counted twice, what is nearer to the sinks goes first: it was sent before what is behind it. What
    went round loops comes last: no barrier waits for that.
    """
    if not manifest.channel_logs:
        return []
    groups, places, codecs = graph.max_parallelism, dict[str, int](), dict[str, BatchCodec]()
    for edge in graph.shuffles:
        name = ShuffleEdge(edge.key_by, edge.stateful).name
        places[name] = graph.nodes.index(graph.node(edge.stateful))
        codecs[name] = BatchCodec(graph.type_of(Input(edge.key_by)))
    loops = {edge.name: graph.nodes.index(graph.node(edge.loop)) for edge in feedback_edges(graph)}
    places |= loops
    same = graph.fingerprint() == manifest.fingerprint
    found: list[InFlightFrame] = []
    for log in sorted(manifest.channel_logs, key=lambda each: (each.subtask, each.task)):
        before = group_range(log.subtask, manifest.parallelism, groups)
        common = common_groups(before, group_range(subtask, parallelism, groups))
        is_ours = (bool(loops) or not same) and log.subtask % parallelism == subtask
        schemas = loop_schemas(log, reader) if is_ours and not same else {}
        misfits = {each.id: misfit(schemas[each.id], each.type) for each in graph.loops if each.id in schemas}
        for each in frames_of(log, reader) if common or is_ours else ():
            ours: bytes | None = None
            if each.edge in loops:
                ours = each.frame if is_ours else None
                if ours is not None and not same:
                    _require_kept(BatchCodec(graph.node(each.loop).type), each, manifest, misfits.get(each.loop))
            elif not same:
                raise _has_no_place(each, manifest)
            elif common:
                ours = each.frame if common == before else codecs[each.edge].of_groups(each.frame, common, groups)
            if ours is not None and skips:
                codec = codecs[each.edge] if each.edge in codecs else BatchCodec(graph.node(each.loop).type)
                ours = codec.without(ours, skips)
            if ours is not None:
                found.append(InFlightFrame(each.channel, ours))
    return sorted(found, key=lambda each: (each.edge in loops, -places[each.edge]))


def _require_kept(codec: BatchCodec, each: InFlightFrame, manifest: Manifest, why: str | None) -> None:
    """Raise unless the records of *each* are of the type that the loop has now, without loss: *why* they are not, by
    its `misfit`; None: the log does not say their schema, and only their values tell, not what they leave out."""
    try:
        again = codec.decode(each.frame)
        if why is None:
            why = "" if is_same(each.frame, codec.encode(again)) else "they would not be what they were"
    except RecordError:
        why = why or "they are not valid as that"
    if why:
        raise GraphError(
            f"Checkpoint {manifest.checkpoint} of {manifest.pipeline!r} holds records that went round loop "
            f"{each.loop!r}, written as another type than it has now: {why}. Give the loop its old type; or run the "
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
    """How many records are on their way on each channel."""
    found: dict[str, int] = {}
    for channel, frame in frames:
        found[channel] = found.get(channel, 0) + records_in(frame)
    return found
