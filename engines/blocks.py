"""The storages that the blocks of a pipeline lie in, and the blocks that a checkpoint stands on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from exactlyonce.checkpoint.block_storage import (
    Blocks,
    BlockStorage,
    DamagedBlock,
    UnreadableBlock,
)
from exactlyonce.checkpoint.records.encoding import Block
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import BlockRef, Manifest
from exactlyonce.checkpoint.records.storage_url import TOPIC, described, setting_of
from exactlyonce.checkpoint.records.topic_info import TopicInfo
from exactlyonce.checkpoint.references import indexes_of, named_by, stands_on
from exactlyonce.connectors.blocks.storage import file_storage
from exactlyonce.connectors.kafka.checkpoint_topic.blocks import TopicStorage
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines.runtime.in_flight import blocks_of
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.sinks.write_ahead.writer import INDEXED
from exactlyonce.sinks.write_ahead.writer import decode_index as list_of_rows
from exactlyonce.state.errors import DamagedState
from exactlyonce.state.index import decode_index


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


def _bodies(reader: Blocks, refs: list[BlockRef]) -> Iterator[tuple[BlockRef, bytes]]:
    return ((ref, block.body) for ref, block in reader.fetch(refs))
