"""The snapshot of a subtask in the checkpoint topic: state, its index, order logs, records on their way; and back.

Invariant: every block of an attempt has a key of its own: no two of a worker have the same part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from exactlyonce.checkpoint.block_storage import (
    AttemptBlocks,
    Blocks,
    BlockStorage,
    DamagedBlock,
    Ticket,
    UnreadableBlock,
)
from exactlyonce.checkpoint.orphans import beyond_repair
from exactlyonce.checkpoint.records.encoding import Block
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import BlockRef, Manifest, OperatorSnapshot
from exactlyonce.checkpoint.records.storage_url import TOPIC, described, setting_of
from exactlyonce.checkpoint.records.topic_info import TopicInfo
from exactlyonce.checkpoint.references import indexes_of, named_by, stands_on
from exactlyonce.connectors.blocks.opening import file_storage
from exactlyonce.connectors.kafka.checkpoint_topic.blocks import TopicStorage
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines.in_flight import FRAMES, blocks_of
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.graph import Node
from exactlyonce.sinks.write_ahead.writer import INDEXED
from exactlyonce.sinks.write_ahead.writer import decode_index as list_of_rows
from exactlyonce.state.backend import StateBackend, Table
from exactlyonce.state.blocks import EncodedBlock
from exactlyonce.state.errors import DamagedState
from exactlyonce.state.index import decode_index
from exactlyonce.state.key_groups import common_groups, group_range
from exactlyonce.state.restore import restore

STATE, INDEX, ORDER, IN_FLIGHT, IN_FLIGHT_LIST = "state", "index", "order", "in-flight", "in-flight-list"


def block_storage(
    client: ClientConfig, topic: TopicInfo, storage: str, *, stays_connected: bool = False
) -> BlockStorage:
    """What every engine keeps the blocks of the pipeline of *topic* in: *storage*, as manifests name it.

    *stays_connected* is for who reads them often. Nothing is connected yet.
    """
    if storage:
        return file_storage(storage, topic)
    return TopicStorage(client.confluent(), topic, stays_connected=stays_connected)


class Storages:
    """The storages of one pipeline, by the URL in its manifests: one, unless its checkpoints were moved.

    Nothing is connected before it is asked. For one thread at a time.
    """

    def __init__(self, client: ClientConfig, topic: TopicInfo, *, stays_connected: bool = False) -> None:
        """*stays_connected* is for who reads them often."""
        self._client, self._topic, self._stays_connected = client, topic, stays_connected
        self._open: dict[str, BlockStorage] = {}

    def of(self, storage: str) -> BlockStorage:
        """The one that *storage* names, as manifests do."""
        if storage not in self._open:
            self._open[storage] = block_storage(
                self._client, self._topic, storage, stays_connected=self._stays_connected
            )
        return self._open[storage]

    def close(self) -> None:
        """Let go of all connections."""
        for each in self._open.values():
            each.close()


def in_use(history: History, storage: str) -> bool:
    """Whether a checkpoint has blocks in *storage*."""
    return any(each.storage == storage and any(True for _ in named_by(each)) for each in history.retained)


def require_own_place(storages: Storages, history: History, storage: str) -> None:
    """ConfigError where *storage*, into which checkpoints are about to move, is a place that they are kept in already,
    by another name: a link, a second mount, another name of a server. Nothing of it would be dropped that is needed by
    either name; but a copy of the place passes for it as well, and who moves somewhere else means another place."""
    if storage == TOPIC or storage == history.storage:
        return
    left = {ref.key: each.storage for each in history.retained if each.storage != storage for ref in named_by(each)}
    found = next((ref.key for ref in storages.of(storage).since(()).blocks if ref.key in left), None) if left else None
    if found is not None:
        raise ConfigError(
            f"{storage} has block {found}, which a checkpoint in {described(left[found])} stands on: it is the same "
            f"place by another name, or a copy of it. Nothing was changed.\n"
            f"  Keep the old name: --checkpoint-storage {setting_of(left[found])}; or move to another place, the topic "
            f"or an empty folder, and from there to this one, once no checkpoint is kept by the old name any more: "
            f"delete the savepoints that are (`exactlyonce savepoints list {history.pipeline}`)."
        )


@dataclass(frozen=True)
class NewestBlocks:
    """Reads blocks where the newest manifest keeps them: what is committed is always of that one."""

    storages: Storages
    history: Callable[[], History]

    def fetch(self, refs: Iterable[BlockRef]) -> Iterable[tuple[BlockRef, Block]]:
        """See `Blocks`."""
        return self.storages.of(self.history().storage).fetch(refs)


class BlockNames:
    """Numbers the blocks of one worker."""

    def __init__(self, subtask: int, records: str = FRAMES) -> None:
        """*records* is what blocks of what was on its way say of it, `in_flight.said_of_records`."""
        self._subtask, self._records = subtask, records
        self._part = 0

    def _next(self) -> int:
        self._part += 1
        return self._part

    def write(self, writer: AttemptBlocks, checkpoint: int, operator: str, block: EncodedBlock) -> Ticket:
        """A block of state."""
        return writer.write(Block(operator, checkpoint, STATE, "zlib", "EOS1", block.body), block.group, self._next())

    def write_index(self, writer: AttemptBlocks, checkpoint: int, operator: str, part: bytes) -> Ticket:
        """A part of the index of a subtask's state."""
        block = Block(operator, checkpoint, INDEX, "none", "EOX2", part)
        return writer.write(block, self._subtask, self._next())

    def write_order(self, writer: AttemptBlocks, checkpoint: int, task: str, subtask: int, part: bytes) -> Ticket:
        """A part of the order log of a subtask since the last barrier."""
        return writer.write(Block(task, checkpoint, ORDER, "none", "msgpack", part), subtask, self._next())

    def write_in_flight(self, writer: AttemptBlocks, checkpoint: int, task: str, subtask: int, body: bytes) -> Ticket:
        """A block of what was on its way to a subtask at the barrier."""
        return writer.write(Block(task, checkpoint, IN_FLIGHT, "zlib", self._records, body), subtask, self._next())

    def write_in_flight_list(
        self, writer: AttemptBlocks, checkpoint: int, task: str, subtask: int, body: bytes
    ) -> Ticket:
        """A list of such blocks."""
        return writer.write(Block(task, checkpoint, IN_FLIGHT_LIST, "none", "msgpack", body), subtask, self._next())

    def write_staged(
        self, writer: AttemptBlocks, checkpoint: int, sink: str, kind: str, subtask: int, body: bytes
    ) -> Ticket:
        """What a sink has set aside."""
        return writer.write(Block(sink, checkpoint, kind, "none", kind, body), subtask, self._next())


@dataclass(frozen=True)
class StagedBlocks:
    """Where the writer of a sink's subtask sets aside what its committables name."""

    blocks: AttemptBlocks
    names: BlockNames
    sink: str
    subtask: int

    @property
    def pending(self) -> int:
        """How many blocks of this worker are on their way."""
        return self.blocks.pending

    def write(self, kind: str, checkpoint: int, body: bytes) -> Ticket:
        """Send a block; those of one subtask go to one partition, and keep their order."""
        return self.names.write_staged(self.blocks, checkpoint, self.sink, kind, self.subtask, body)


def restore_table(
    node: Node,
    groups: range,
    max_parallelism: int,
    checkpoint: int,
    snapshot: OperatorSnapshot | None,
    reader: Blocks,
    touched: Collection[int] | None = None,
    *,
    drops_fields: bool,
    backend: StateBackend,
) -> Table[Any]:
    """The table of *node* for *groups* at *checkpoint*; of these, only the *touched* ones are read if that is given."""
    indexes = [body for _, body in _bodies(reader, _indexes(snapshot, groups, max_parallelism))]
    return restore(
        node.id,
        replace(node.kept, drops_fields=drops_fields),
        groups,
        max_parallelism,
        checkpoint,
        indexes,
        lambda wanted: _bodies(reader, wanted),
        touched,
        backend=backend,
    )


def _indexes(snapshot: OperatorSnapshot | None, groups: range, max_parallelism: int) -> list[BlockRef]:
    """The indexes of the old subtasks that had any of *groups*."""
    if snapshot is None:
        return []
    owned = [group_range(subtask, snapshot.parallelism, max_parallelism) for subtask in range(snapshot.parallelism)]
    return [
        ref
        for before, parts in zip(owned, snapshot.index, strict=True)
        if common_groups(before, groups)
        for ref in parts
    ]


def references(manifest: Manifest, reader: Blocks) -> set[BlockRef]:
    """Every block that *manifest* stands on: what it names itself, and what its indexes list.

    Raises `DamagedBlock` or `DamagedState` where an index is not what was written; but one of rows that wait for a
    store only lists nothing: no state is restored from it, and who commits them finds it before anything may go.
    """
    bodies = (body for _, body in _bodies(reader, list(indexes_of(manifest))))
    listed = {block.ref for body in bodies for block in decode_index(body).blocks}
    for log in manifest.channel_logs:
        listed.update(blocks_of(log, reader))
    indexes = [ref for each in manifest.staged if each.body == INDEXED for ref in each.blocks]
    with suppress(DamagedBlock):
        for _, body in _bodies(reader, indexes):
            listed.update(list_of_rows(body))
    return stands_on(manifest, listed)


def references_or_why(manifest: Manifest, reader: Blocks) -> frozenset[BlockRef] | str:
    """Every block that *manifest* stands on; or why that cannot be known: nothing can be restored from it."""
    try:
        return frozenset(references(manifest, reader))
    except (DamagedBlock, DamagedState) as error:
        return str(error)


def damaged_among(refs: Iterable[BlockRef], reader: Blocks) -> dict[BlockRef, str]:
    """Those of *refs* that are not what was written, are gone, or are refused, and why: all are read."""
    damaged, left = dict[BlockRef, str](), set(refs)
    while left:
        try:
            for ref, _ in reader.fetch([*left]):
                left.discard(ref)
        except (DamagedBlock, UnreadableBlock) as error:
            damaged[error.ref] = str(error)
            left.discard(error.ref)
    return damaged


@contextmanager
def whole_or_halt(manifest: Manifest) -> Iterator[None]:
    """While what *manifest* refers to is read: if it is not all there, a halt with the choices."""
    try:
        yield
    except (DamagedBlock, DamagedState) as error:
        raise beyond_repair(manifest, str(error)) from error


def _bodies(reader: Blocks, refs: list[BlockRef]) -> Iterator[tuple[BlockRef, bytes]]:
    return ((ref, block.body) for ref, block in reader.fetch(refs))
