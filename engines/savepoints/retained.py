"""A retained checkpoint, read or deleted while its pipeline may run on.

Invariants: only the holder of the fenced log deletes, in one transaction, and never blocks of another checkpoint or the
newest one, from which the pipeline goes on. A run that has begun meanwhile is not fenced: the command is refused then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import datetime, timezone

from exactlyonce.checkpoint.block_storage import DamagedBlock
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_history
from exactlyonce.connectors.kafka.checkpoint_topic.topic import find_topic
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.engines import run_requests
from exactlyonce.engines.blocks import block_storage
from exactlyonce.engines.connections import short_incarnation
from exactlyonce.engines.savepoints.contents import TopicSavepoint
from exactlyonce.pipeline.errors import ConfigError


def choose_checkpoint(history: History, at: int | None) -> Manifest:
    """Checkpoint *at*, or the newest; ConfigError, with the existing ones, if there is none such."""
    retained = [manifest.checkpoint for manifest in history.retained]
    if at is None and history.latest is not None:
        return history.latest
    if at not in retained:
        there = f"It has {', '.join(map(str, retained))}." if retained else "It has none yet."
        raise ConfigError(f"{history.pipeline} has no checkpoint{'' if at is None else f' {at}'}. {there}")
    return history.manifests[at]


def chosen_checkpoint(history: History, at: int | None, moment: datetime | None) -> Manifest:
    """Checkpoint *at*, or the newest that was complete at *moment*, or the newest; ConfigError without one."""
    if moment is None:
        return choose_checkpoint(history, at)
    moment_ms = moment.timestamp() * 1000
    complete = [manifest for manifest in history.retained if manifest.completed_at_ms <= moment_ms]
    if not complete:
        first = min(history.retained, key=lambda manifest: manifest.checkpoint, default=None)
        there = "It has none yet."
        if first is not None:
            since = datetime.fromtimestamp(first.completed_at_ms / 1000, timezone.utc).isoformat(timespec="seconds")
            there = f"The oldest one that is retained is {first.checkpoint}, complete since {since}."
        raise ConfigError(f"{history.pipeline} has no checkpoint of {moment.isoformat()} or before. {there}")
    return max(complete, key=lambda manifest: manifest.checkpoint)


def require_savepoint(history: History, number: int) -> Manifest:
    """Savepoint *number*; ConfigError, with the existing ones, if there is none such."""
    savepoints = history.savepoints
    if number not in savepoints:
        there = f"It has {', '.join(map(str, savepoints))}." if savepoints else "It has none."
        raise ConfigError(f"{history.pipeline} has no savepoint {number} in its topic. {there}")
    return savepoints[number]


def require_finalized(history: History) -> None:
    """ConfigError until all output of the newest checkpoint is known to be committed."""
    if history.unfinalized is not None:
        raise ConfigError(
            f"Checkpoint {history.unfinalized.checkpoint} of {history.pipeline} is decided, and not all of it is known "
            f"to be committed. Run the pipeline, or `exactlyonce transactions commit {history.pipeline}`, and ask "
            f"again."
        )


@contextmanager
def unless_expired(config: ClientConfig, manifest: Manifest) -> Iterator[None]:
    """ConfigError if blocks of *manifest*, read in the block, are missing because it has expired."""
    try:
        yield
    except DamagedBlock:
        if manifest.checkpoint in read_history(config, manifest.pipeline).manifests:
            raise
        raise ConfigError(
            f"Checkpoint {manifest.checkpoint} has expired while it was read: the pipeline runs on. Try again; a "
            f"longer --num-retained of the run keeps more checkpoints, and a savepoint never expires."
        ) from None


@contextmanager
def open_savepoint(config: ClientConfig, manifest: Manifest) -> Iterator[TopicSavepoint]:
    """The finalized checkpoint of *manifest* as a savepoint."""
    with closing(Transactions(config)) as transactions:
        cluster_id = transactions.cluster_id()
    topic = find_topic(config, manifest.pipeline)
    with closing(block_storage(config, topic, manifest.storage, stays_connected=True)) as blocks:
        yield TopicSavepoint(manifest, blocks, cluster_id)


def delete(
    config: ClientConfig, history: History, checkpoint: int, timeout_ms: int, note: Callable[[str], None]
) -> None:
    """Delete savepoint *checkpoint*; ConfigError where that is impossible. A run has *timeout_ms* to do so."""
    manifest = require_savepoint(history, checkpoint)
    if manifest is history.latest:
        raise ConfigError(
            f"Savepoint {checkpoint} is the newest checkpoint of {history.pipeline}: the next run goes on from it. Run "
            f"it first, and delete the savepoint once it has taken another checkpoint."
        )
    if (living := run_requests.living_run(history)) is not None:
        run_requests.require_listener(history.pipeline, living)
        run_requests.delete(config, history.pipeline, checkpoint, timeout_ms, note)
        return
    history.halt_if_damaged()
    require_finalized(history)
    with short_incarnation(config, history, None, note, require=require_finalized) as connections:
        leader = connections.leader
        require_finalized(leader.log.history)
        connections.drive(leader.retention.recover(leader.log.history, leader.incarnation.incarnation))
        connections.drive(leader.forget_savepoint(checkpoint, ()))
