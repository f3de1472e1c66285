"""A savepoint, wherever it lies: what it says of itself, the states of its operators, and what goes round its loops.

Invariant: it stands for itself. Nothing in it refers to a transaction, a committable or another checkpoint; its offsets
are those of topics by their names, with the ids that these had.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import msgspec

from exactlyonce.checkpoint.block_storage import Blocks
from exactlyonce.checkpoint.records.manifest import Manifest, SourceOffset
from exactlyonce.engines.savepoints.kept_state import KeptEntry, kept_state
from exactlyonce.engines.savepoints.loops import LoopEntry, entries_of, records_by_loop, schemas_of
from exactlyonce.pipeline.errors import ConfigError


class SavedFile(msgspec.Struct, frozen=True):
    """A file of an export: states of one operator, all of one version."""

    name: str
    size: int
    sha256: str
    entries: int
    version: int


class SavedOperator(msgspec.Struct, frozen=True):
    """The state of one operator."""

    operator: str
    schema: Any = None
    """Of the states of the newest version, as `VersionedState.schema` gives it; None: there are none."""
    version: int = 1
    """The newest of its states."""
    keys: Any = None
    """The schema of the keys, as far as their type is noted."""
    key_forms: int = 0
    """Of an export, what its keys are, whatever their type: `pipeline.key_types`; 0: unknown."""
    files: tuple[SavedFile, ...] = ()
    """Of an export; in the topic there are none."""


class SavedLoop(msgspec.Struct, frozen=True):
    """What goes round one loop."""

    loop: str
    records: int
    schema: Any = None
    """Of the records, as `pipeline.schema` describes them; None: it is not known."""
    files: tuple[SavedFile, ...] = ()
    """Of an export."""


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """What a savepoint says of itself."""

    pipeline: str
    checkpoint: int
    kind: str
    cluster_id: str
    completed_at_ms: int
    max_parallelism: int
    fingerprint: str
    offsets: tuple[SourceOffset, ...]
    operators: tuple[SavedOperator, ...]
    loops: tuple[SavedLoop, ...] = ()
    """Those in which something goes round."""


class Savepoint(Protocol):
    """One that can be exported, or restored."""

    @property
    def saved(self) -> Saved: ...

    @property
    def origin(self) -> str:
        """`Manifest.origin` of what is restored from it: no other savepoint has the same."""

    @property
    def name(self) -> str:
        """For people."""

    def entries(self, operator: str) -> Iterator[KeptEntry]:
        """All states of *operator*. Raises what says which block or file is damaged."""

    def going_round(self, loop: str) -> Iterator[LoopEntry]:
        """What goes round *loop*, subtask by subtask, in its order. Raises likewise."""


class TopicSavepoint:
    """A `Savepoint` that is a checkpoint of a pipeline in its own topic."""

    def __init__(self, manifest: Manifest, blocks: Blocks, cluster_id: str) -> None:
        """Raises ConfigError for a checkpoint whose barriers have overtaken records."""
        loops, overtaken = records_by_loop(manifest, blocks)
        if overtaken:
            raise ConfigError(
                f"Checkpoint {manifest.checkpoint} of {manifest.pipeline} is unaligned: it holds {overtaken} records "
                f"that a barrier had overtaken. Neither an export nor --from-savepoint can take them along, and they "
                f"would be lost. Take a savepoint while the pipeline runs, which is aligned, or let it end cleanly. A "
                f"run without --from-savepoint goes on from this checkpoint as it is."
            )
        self._manifest, self._blocks = manifest, blocks
        schemas = schemas_of(manifest, blocks) if loops else {}
        heads = {each.operator: kept_state(manifest, each.operator, blocks).head() for each in manifest.operators}
        self.saved = Saved(
            pipeline=manifest.pipeline,
            checkpoint=manifest.checkpoint,
            kind=manifest.kind,
            cluster_id=cluster_id,
            completed_at_ms=manifest.completed_at_ms,
            max_parallelism=manifest.max_parallelism,
            fingerprint=manifest.fingerprint,
            offsets=manifest.offsets,
            operators=tuple(
                SavedOperator(operator, head.schema, head.version, head.keys) if head else SavedOperator(operator)
                for operator, head in heads.items()
            ),
            loops=tuple(SavedLoop(loop, records, schemas.get(loop)) for loop, records in sorted(loops.items())),
        )

    @property
    def origin(self) -> str:
        return origin_in_topic(self.saved.checkpoint)

    @property
    def name(self) -> str:
        kind = "savepoint" if self._manifest.is_savepoint else "checkpoint"
        return f"{kind} {self.saved.checkpoint} of {self.saved.pipeline}"

    def entries(self, operator: str) -> Iterator[KeptEntry]:
        return kept_state(self._manifest, operator, self._blocks).entries()

    def going_round(self, loop: str) -> Iterator[LoopEntry]:
        return entries_of(self._manifest, self._blocks, loop)


def origin_in_topic(checkpoint: int) -> str:
    """The origin of what goes on from savepoint *checkpoint* of the same pipeline."""
    return f"savepoint {checkpoint}"
