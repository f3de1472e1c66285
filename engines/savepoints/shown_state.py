"""The state of operators at a checkpoint, by key: read from blocks, so that no running pipeline is disturbed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from exactlyonce.checkpoint.block_storage import Blocks
from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_topic
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines.blocks import block_storage
from exactlyonce.engines.savepoints.contents import KeptEntry, decoded, kept_state
from exactlyonce.engines.savepoints.retained import choose_checkpoint, unless_expired
from exactlyonce.pipeline.foreign_keys import is_table_join, shown_state
from exactlyonce.pipeline.timers import shown_entry
from exactlyonce.pipeline.windows import kept_in, moment, window_of
from exactlyonce.state.chain import IndexHead


@dataclass(frozen=True)
class OperatorView:
    """A stateful operator."""

    operator: str
    checkpoint: int
    parallelism: int
    state_bytes: int
    schema: Any
    """The schema of its states; None: it has none."""
    version: int = 1
    """The newest version of its states."""
    meaning: str | None = None
    """What the slots of a timed table stand for (`GroupTimes.meaning`)."""


@dataclass(frozen=True)
class KeyView:
    key_group: int
    key: Any
    state: Any
    version: int
    """The version of the writer."""


@dataclass(frozen=True)
class TimedKeyView(KeyView):
    """A key in a window that is not over, or in another slot; of hopping windows, in a pane, which several share. Of a
    window with early or late results, what they have had and what is new since are apart."""

    start: datetime | None
    """None: the slot is none of a window."""
    end: datetime | None
    """The end of the window or pane, or the time at which the state is due; None: it never is. A session may grow."""


@dataclass(frozen=True)
class StateView:
    """The state at one checkpoint, readable while `state_at` is open."""

    manifest: Manifest
    _blocks: Blocks

    def operators(self) -> list[OperatorView]:
        return [self.operator(snapshot.operator) for snapshot in self.manifest.operators]

    def operator(self, operator: str) -> OperatorView:
        """One operator; ConfigError, which lists the operators, if there is no such one."""
        head = kept_state(self.manifest, operator, self._blocks).head()
        snapshot = next(snapshot for snapshot in self.manifest.operators if snapshot.operator == operator)
        return OperatorView(
            operator, self.manifest.checkpoint, snapshot.parallelism, snapshot.state_bytes,
            head.schema if head is not None else None, head.version if head is not None else 1,
            head.times.meaning if head is not None and head.times is not None else None,
        )  # fmt: skip

    def keys(self, operator: str, key: str | None = None) -> Iterator[KeyView]:
        """The keys of *operator* and their states; *key* is one as people write it, in JSON or as plain text."""
        kept = kept_state(self.manifest, operator, self._blocks)
        return key_views(kept.head(), kept.entries() if key is None else kept.of_key(key))


def key_views(head: IndexHead | None, entries: Iterable[KeptEntry]) -> Iterator[KeyView]:
    """*entries* decoded. The schema in *head* is of the newest version only."""
    for entry in entries:
        schema = head.schema if head is not None and entry.version == head.version else None
        view = KeyView(entry.group, decoded(entry.key), decoded(entry.state, schema), entry.version)
        yield from [view] if head is None or head.times is None else _timed(view, head.times.meaning, entry.slot)


def _timed(view: KeyView, meaning: str, slot: int | None) -> Iterator[TimedKeyView]:
    assert slot is not None
    if meaning.startswith(("process=", "co_process=", "batches=")):
        due_ms, state = shown_entry(slot, view.state)
        at = None if due_ms is None else moment(due_ms)
        yield TimedKeyView(view.key_group, view.key, state, view.version, start=None, end=at)
        return
    if is_table_join(meaning):
        if (state := shown_state(meaning, slot, view.state)) is not None:
            yield TimedKeyView(view.key_group, view.key, state, view.version, start=None, end=None)
        return
    if (window := window_of(meaning)) is None:
        yield TimedKeyView(**vars(view), start=None, end=moment(slot + 1))
        return
    for start, end, state in kept_in(window, slot, view.state):
        yield TimedKeyView(view.key_group, view.key, state, view.version, moment(start), moment(end))


@contextmanager
def state_at(config: ClientConfig, pipeline: str, checkpoint: int | None = None) -> Iterator[StateView]:
    """The state of *pipeline* at a retained checkpoint, by default the newest.

    Raises ConfigError if there is no such checkpoint, or it expires while it is read.
    """
    topic, history = read_topic(config, pipeline)
    manifest = choose_checkpoint(history, checkpoint)
    storage = block_storage(config, topic, manifest.storage, stays_connected=True)
    with closing(storage) as blocks, unless_expired(config, manifest):
        yield StateView(manifest, blocks)
