"""Savepoints: whether they could be restored."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

from exactlyonce.checkpoint.block_storage import DamagedBlock, UnreadableBlock
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_history
from exactlyonce.connectors.kafka.checkpoint_topic.topic import find_topic
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines.blocks import block_storage, damaged_among, references
from exactlyonce.engines.savepoints.exported import DamagedSavepoint, ExportedSavepoint
from exactlyonce.engines.savepoints.retained import require_savepoint
from exactlyonce.state.errors import DamagedState


@dataclass(frozen=True)
class VerifiedSavepoint:
    """A savepoint of which all was read and compared with its SHA-256."""

    pipeline: str
    """Name of the pipeline; empty: not even that can be read of an exported one."""
    checkpoint: int
    damage: tuple[str, ...]
    """One sentence for each damage; none: it is whole."""
    parts: int
    """Its blocks, or the files of an exported one."""
    finalized: bool = True
    """Whether all of it is known to be committed."""


def verified(config: ClientConfig, pipeline: str, checkpoint: int) -> VerifiedSavepoint:
    """Read every block of a savepoint in the topic of *pipeline*; ConfigError if there is none of that number."""
    history = read_history(config.confluent(), pipeline)
    manifest = require_savepoint(history, checkpoint)
    topic, parts = find_topic(config.confluent(), pipeline), 0
    with closing(block_storage(config, topic, manifest.storage, stays_connected=True)) as blocks:
        try:
            wanted = references(manifest, blocks)
            parts, damage = len(wanted), tuple(damaged_among(wanted, blocks).values())
        except (DamagedBlock, UnreadableBlock, DamagedState) as error:
            damage = (str(error),)
    return VerifiedSavepoint(pipeline, checkpoint, damage, parts, checkpoint in history.finalized)


def verified_export(url: str) -> VerifiedSavepoint:
    """Read every file of the savepoint that was exported to *url*."""
    try:
        found = ExportedSavepoint.at(url)
        return VerifiedSavepoint(found.saved.pipeline, found.saved.checkpoint, tuple(found.damage()), found.files)
    except DamagedSavepoint as error:
        return VerifiedSavepoint("", 0, (str(error),), 0)
