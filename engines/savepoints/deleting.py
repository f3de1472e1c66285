"""The deletion of a savepoint: by the run, if there is one, else by a short incarnation that does nothing else.

Invariant: only the holder of the fenced log drops anything, in one transaction, and never what another checkpoint
stands on. The newest checkpoint is what the pipeline goes on from, and stays. A run that has begun meanwhile is left to
go on: it is refused then, and asked when the command is repeated.
"""

from __future__ import annotations

from collections.abc import Callable

from exactlyonce.checkpoint.records.history import History
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines import asking
from exactlyonce.engines.savepoints.retained import require_finalized, require_savepoint
from exactlyonce.engines.short_incarnation import short_incarnation
from exactlyonce.pipeline.errors import ConfigError


def delete(
    config: ClientConfig, history: History, checkpoint: int, timeout_ms: int, note: Callable[[str], None]
) -> None:
    """Delete savepoint *checkpoint*; ConfigError where that cannot be done. A run is waited for *timeout_ms*."""
    manifest = require_savepoint(history, checkpoint)
    if manifest is history.latest:
        raise ConfigError(
            f"Savepoint {checkpoint} is the newest checkpoint of {history.pipeline}: the next run goes on from it. Run "
            f"it first, and delete the savepoint once it has taken another checkpoint."
        )
    if (living := asking.living_run(history)) is not None:
        asking.require_listener(history.pipeline, living)
        asking.delete(config, history.pipeline, checkpoint, timeout_ms, note)
    else:
        _delete_alone(config, history, checkpoint, note)


def _delete_alone(config: ClientConfig, history: History, checkpoint: int, note: Callable[[str], None]) -> None:
    history.halt_if_damaged()
    require_finalized(history)
    with short_incarnation(config, history, None, note, require=require_finalized) as connections:
        leader = connections.leader
        require_finalized(leader.log.history)
        connections.drive(leader.retention.recover(leader.log.history, leader.incarnation.incarnation))
        connections.drive(leader.forget_savepoint(checkpoint, ()))
