"""A checkpoint that is looked at while its pipeline runs on: which one, and what if it expires meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

from exactlyonce.checkpoint.block_storage import DamagedBlock
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_history
from exactlyonce.connectors.kafka.checkpoint_topic.topic import find_topic
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.engines.blocks import block_storage
from exactlyonce.engines.savepoints.contents import TopicSavepoint
from exactlyonce.pipeline.errors import ConfigError


def chosen(history: History, at: int | None) -> Manifest:
    """Checkpoint *at*, or the newest; ConfigError, with those that there are, if it is none of them."""
    retained = [each.checkpoint for each in history.retained]
    if at is None and history.latest is not None:
        return history.latest
    if at not in retained:
        there = f"It has {', '.join(map(str, retained))}." if retained else "It has none yet."
        raise ConfigError(f"{history.pipeline} has no checkpoint{'' if at is None else f' {at}'}. {there}")
    return history.manifests[at]


def require_savepoint(history: History, number: int) -> Manifest:
    """Savepoint *number*; ConfigError, with those that there are, if it is none of them."""
    found = history.savepoints
    if number not in found:
        there = f"It has {', '.join(map(str, found))}." if found else "It has none."
        raise ConfigError(f"{history.pipeline} has no savepoint {number} in its topic. {there}")
    return found[number]


def require_finalized(history: History) -> None:
    """ConfigError while not all output of the newest checkpoint is known to be committed."""
    if history.unfinalized is not None:
        raise ConfigError(
            f"Checkpoint {history.unfinalized.checkpoint} of {history.pipeline} is decided, and not all of it is known "
            f"to be committed. Run the pipeline, or `exactlyonce transactions commit {history.pipeline}`, and ask "
            f"again."
        )


@contextmanager
def unless_expired(config: ClientConfig, manifest: Manifest) -> Iterator[None]:
    """While blocks of *manifest* are read: ConfigError for those that are missing because it has expired."""
    try:
        yield
    except DamagedBlock:
        if manifest.checkpoint in read_history(config.confluent(), manifest.pipeline).manifests:
            raise
        raise ConfigError(
            f"Checkpoint {manifest.checkpoint} has expired while it was read: the pipeline runs on. Try again; a "
            f"longer --num-retained of the run keeps more checkpoints, and a savepoint never expires."
        ) from None


@contextmanager
def opened(config: ClientConfig, manifest: Manifest) -> Iterator[TopicSavepoint]:
    """What the finalized checkpoint of *manifest* holds."""
    with closing(Transactions(config)) as transactions:
        cluster_id = transactions.cluster_id()
    topic = find_topic(config.confluent(), manifest.pipeline)
    with closing(block_storage(config, topic, manifest.storage, stays_connected=True)) as blocks:
        yield TopicSavepoint(manifest, blocks, cluster_id)
