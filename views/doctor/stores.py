"""The stores of sinks: whether they accept writes, and whether their ledgers agree with the decisions."""

from __future__ import annotations

from exactlyonce.checkpoint.commits.stores import ledger_of, named_ledger, positions_of, require_in_step, require_own
from exactlyonce.checkpoint.records.history import History
from exactlyonce.connectors.kafka.checkpoint_topic.topic import find_topic
from exactlyonce.pipeline.errors import Halt
from exactlyonce.sinks.committer import StoreView
from exactlyonce.views.doctor.findings import NOTE, Findings
from exactlyonce.views.doctor.subject import Subject


def check_stores(subject: Subject, findings: Findings) -> None:
    if subject.graph is None and not subject.resources.is_sink:
        why = "these are known by the pipeline's module alone: give module:pipeline"
        findings.not_checked("outputs since the last checkpoint, and stores of sinks that are not exactly once", why)
    for sink, why in subject.staged.unasked.items():
        findings.not_checked(f"the store of sink {sink}", why, failed=sink in subject.staged.failed)
    for sink, view in subject.staged.views.items():
        findings.checked.append(f"the store of sink {sink}")
        if view.problem:
            findings.add(
                "stores", f"The store of sink {sink} does not take what it writes: {view.problem}",
                whose=f"the store's, or the sink's in the pipeline {subject.name}", do="as it says: a run refuses",
            )  # fmt: skip
        if view.risk:
            findings.add(
                "stores", f"Waiting output of sink {sink} may be removed: {view.risk}", level=NOTE,
                do="let the rule leave out that prefix, or never leave the pipeline stopped or failing for so long",
            )  # fmt: skip
        if view.growth:
            findings.add(
                "stores", f"The table of sink {sink} {view.growth}", level=NOTE,
                do="as it says, by a job beside the pipeline: docs/sinks/lakes.md, Upkeep",
            )  # fmt: skip
        if view.origin and subject.history is not None and subject.newest is not None:
            with findings.checking(f"the ledger of sink {sink}"):
                _ledger(subject, subject.history, sink, view, findings)


def _ledger(subject: Subject, history: History, sink: str, view: StoreView, findings: Findings) -> None:
    """Compare a ledger with the earlier decisions, which it must have, and with the newest one, which bounds it."""
    now = subject.history_now
    known = positions_of(history.latest_finalized)
    highest = now.latest.checkpoint if now is not None and now.latest is not None else 0
    origin = find_topic(subject.config, subject.name).topic_id
    try:
        require_own(named_ledger(sink), origin, view.origin)
        require_in_step(named_ledger(sink), view.ledger, ledger_of(known, sink), highest)
    except Halt as error:
        what, _, choices = str(error).partition("\n")
        findings.add("stores", what, whose=f"the ledger of sink {sink}", do=choices.strip() or "as it says")
