"""A look at a store beside a run: its ledger, and why it does not take rows. Nothing is changed by it."""

from __future__ import annotations

from exactlyonce.pipeline.errors import ConfigError, StoreError
from exactlyonce.sinks.committer import CommitterContext, StoreView
from exactlyonce.sinks.write_ahead.store import InspectableStore


def looked(store: object, context: CommitterContext) -> StoreView | None:
    """What *store* shows of the sink; None where it cannot be looked at without being changed."""
    if not isinstance(store, InspectableStore):
        return None
    try:
        store.inspect()
        problem = ""
    except (StoreError, ConfigError) as error:
        problem = str(error)
    try:
        ledger = store.ledger_of(context.pipeline, context.sink)
    except StoreError as error:
        return StoreView(problem=problem or str(error))
    return StoreView(
        incarnation=ledger.incarnation, origin=ledger.origin, ledger=dict(ledger.checkpoints), problem=problem
    )
