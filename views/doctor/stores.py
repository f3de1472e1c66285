"""The stores beside Kafka: whether they take what the sinks write, and whether their ledgers are where they should
be."""

from __future__ import annotations

from exactlyonce.checkpoint.commits.of_stores import ledger_of, named_ledger, positions_of, require_in_step, require_own
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.connectors.kafka.checkpoint_topic.topic import find_topic
from exactlyonce.pipeline.errors import Halt
from exactlyonce.sinks.committer import StoreView
from exactlyonce.views.doctor.findings import Findings
from exactlyonce.views.doctor.subject import Subject


def check_stores(subject: Subject, findings: Findings) -> None:
    """Judge what the stores have shown."""
    if subject.graph is None and not subject.traces.is_sink:
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
        if view.origin and subject.history is not None and subject.newest is not None:
            with findings.checking(f"the ledger of sink {sink}"):
                _ledger(subject, subject.history, sink, view, findings)
    if not subject.sign_of_life:
        _left(subject, findings)


def _ledger(subject: Subject, history: History, sink: str, view: StoreView, findings: Findings) -> None:
    """Compare it with the decisions before it was looked at, which it must have, and with those behind, which bound
    it."""
    now = subject.history_now
    known = positions_of(finalized(history))
    highest = now.latest.checkpoint if now is not None and now.latest is not None else 0
    origin = find_topic(subject.config.confluent(), subject.name).topic_id
    try:
        require_own(named_ledger(sink), origin, view.origin)
        require_in_step(named_ledger(sink), view.ledger, ledger_of(known, sink), highest)
    except Halt as error:
        what, _, choices = str(error).partition("\n")
        findings.add("stores", what, whose=f"the ledger of sink {sink}", do=choices.strip() or "as it says")


def finalized(history: History) -> Manifest | None:
    """The newest manifest all of whose output is known to be committed."""
    unfinalized = history.unfinalized
    return history.latest if unfinalized is None else history.manifests.get(unfinalized.previous)


def _left(subject: Subject, findings: Findings) -> None:
    """Tell of prepared transactions that hold locks in a store though nobody decides on them any more."""
    for each in subject.staged.waiting:
        if each.holds and not each.is_decided:
            findings.add(
                "stores", f"The prepared transaction {each.name} waits in the store of sink {each.sink}: it holds "
                f"locks, and holds back what the server cleans up",
                whose=f"this pipeline's, incarnation {each.incarnation}, decided by no checkpoint",
                do="run the pipeline, or abort it", run=["exactlyonce transactions abort MODULE:PIPELINE"],
            )  # fmt: skip
