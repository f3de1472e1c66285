"""The decision log: whether it is there and whole, and whether its newest checkpoint is finalized."""

from __future__ import annotations

from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.engines.ending.waiting import unfinalized_committables
from exactlyonce.pipeline.durations import shown_duration
from exactlyonce.pipeline.errors import Halt
from exactlyonce.pipeline.sizes import counted
from exactlyonce.views.doctor.findings import NOTE, PROBLEM, Findings
from exactlyonce.views.doctor.subject import Subject


def check_decisions(subject: Subject, findings: Findings) -> None:
    resources, topic = subject.resources, subject.checkpoint_topic
    if resources.topic is None:
        gone = bool(resources.transactions)
        findings.add(
            "decisions",
            f"There is no topic {topic}, " + ("though the brokers know transactions of the pipeline: it was deleted"
            if gone else "for the pipeline has not run yet"),
            level=PROBLEM if gone else NOTE,
            do=f"restore the topic from a replica or a backup, or `exactlyonce reset {subject.name}`" if gone
            else "nothing: the first run makes it",
        )  # fmt: skip
        return
    if subject.history is None:
        findings.add(
            "decisions", f"{topic} cannot be read as a log of decisions: {resources.unreadable}",
            whose="the checkpoint topic's", do="as it says; transactions, inputs and blocks are not compared with it",
        )  # fmt: skip
        return
    findings.checked.append(f"decisions in {topic}")
    _failure(subject, subject.history, findings)
    _damage(subject, subject.history, findings)
    if subject.history.unfinalized is not None:
        _unfinalized(subject, subject.history, subject.history.unfinalized, findings)


def _failure(subject: Subject, history: History, findings: Findings) -> None:
    """Report why the last run ended, if it failed and none has begun since."""
    newest = history.newest_incarnation
    if newest is None or not newest.exit_code:
        return
    ago = shown_duration(max(0, subject.now_ms - newest.heartbeat_ms))
    skip = f", or leave the record out: `exactlyonce run ... --skip {newest.skip}`" if newest.skip else ""
    findings.add(
        "decisions", f"The last run has failed with code {newest.exit_code}, {ago} ago: {newest.failure.rstrip('.')}",
        whose=f"incarnation {newest.incarnation}, process {newest.process} on {newest.host}",
        do=f"as it says, and run the pipeline again{skip}",
    )  # fmt: skip


def _damage(subject: Subject, history: History, findings: Findings) -> None:
    fatal = ""
    try:
        history.halt_if_damaged()
    except Halt as error:
        fatal = str(error)
    for key, why in history.damaged.items():
        findings.add(
            "decisions", f"{subject.checkpoint_topic}[0] is damaged at {key}: {why}",
            whose=fatal or "an older decision, which a run does without",
            do="restore the topic from a replica or a backup, and look at the disks of the brokers" if fatal
            else "look at the disks of the brokers; it goes when its checkpoint expires",
        )  # fmt: skip


def _unfinalized(subject: Subject, history: History, manifest: Manifest, findings: Findings) -> None:
    """Report a decided checkpoint with output that may not be visible yet."""
    decided = [output for output in subject.waiting or () if output.is_decided]
    count = len(unfinalized_committables(history)) + len(manifest.staged)
    runs, now_ms = subject.sign_of_life, subject.now_ms
    lefts = [left for output in decided if (left := output.left_ms(now_ms)) is not None]
    lost = [output for output in decided if output.state in ("CompleteAbort", "Dead", "gone")]
    age = shown_duration(max(0, now_ms - manifest.completed_at_ms))
    what = (
        f"Checkpoint {manifest.checkpoint} was decided {age} ago and is not finalized: "
        f"{counted(manifest.records_committed, 'record')} may not be visible yet"
    )
    whose = f"{counted(count, 'committable')} of this pipeline"
    if lost:
        whose += f"; {len(lost)} of them aborted by the broker: {', '.join(output.name for output in lost)}"
    if lefts:
        whose += f"; the broker aborts the first in {shown_duration(min(lefts))}: then it has to be repaired"
    do, run = "run the pipeline, or commit it", [f"exactlyonce transactions commit {subject.named}"]
    if runs:
        run = []
        do = "nothing: the pipeline runs, and finishes it; if it has waited for long, its notes say for what"
    findings.add("decisions", what, whose=whose, do=do, run=run, level=NOTE if runs and not lost else PROBLEM)
