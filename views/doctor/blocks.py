"""The blocks of checkpoints, wherever they are kept: those that are damaged, or that no manifest stands on."""

from __future__ import annotations

from contextlib import closing

from exactlyonce.checkpoint.orphans import when_given_up
from exactlyonce.checkpoint.records.encoding import BlockKey
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import BlockRef, Manifest
from exactlyonce.checkpoint.records.storage_url import TOPIC
from exactlyonce.connectors.kafka.checkpoint_topic.topic import find_topic
from exactlyonce.engines.blocks import Storages, damaged_among
from exactlyonce.pipeline.sizes import counted, shown_bytes
from exactlyonce.views.doctor.findings import NOTE, PROBLEM, Findings
from exactlyonce.views.doctor.subject import Subject
from exactlyonce.views.unclaimed_blocks import BlockSurvey, needed_blocks, survey


def check_blocks(subject: Subject, findings: Findings, *, deep: bool) -> None:
    """Look at indexes and places; where it is to be *deep*, read every block and compare it with its SHA-256."""
    history, newest = subject.history, subject.newest
    if history is None or newest is None:
        return
    what = "all blocks" if deep else "indexes of blocks, and orphans behind the last checkpoint"
    with findings.checking(what):
        topic = find_topic(subject.config.confluent(), subject.name)
        with closing(Storages(subject.config, topic)) as storages:
            found = survey(storages, history, deep=deep)
            damaged = _damaged_blocks(storages, found, history) if deep else {}
            _damage(subject, storages, found, damaged, findings)
            _orphans(subject, newest, found, findings)
            for storage, why in found.unreachable.items():
                findings.not_checked(f"what the pipeline has left in {storage}", why)
            for place in (each for scanned in found.scanned.values() for each in scanned.unreadable):
                findings.add(
                    "blocks", f"{place} cannot be read", whose="the checkpoint topic's",
                    do="look at the disks of the brokers; blocks that lie there cannot be removed",
                )  # fmt: skip
            if not deep:
                why = f"{counted(len(found.claimed), 'block')}: --deep reads them all"
                findings.not_checked("the bytes of blocks, and orphans before the last checkpoint", why)


def _damaged_blocks(storages: Storages, found: BlockSurvey, history: History) -> dict[BlockRef, str]:
    """The blocks that nothing can be restored from, and why."""
    damaged = dict[BlockRef, str]()
    for storage in history.storages:
        needed = (found.references[each.checkpoint] for each in history.retained if each.storage == storage)
        refs = {ref for refs in needed if not isinstance(refs, str) for ref in refs}
        damaged |= damaged_among(refs, storages.of(storage))
    return damaged


def _damage(
    subject: Subject, storages: Storages, found: BlockSurvey, blocks: dict[BlockRef, str], findings: Findings
) -> None:
    """Say which checkpoints are damaged; what has expired while it was looked at is none."""
    if not found.damaged and not blocks:
        return
    now = subject.history_now
    assert now is not None  # it was read before
    for checkpoint, why in found.damaged.items():
        if checkpoint in now.manifests:
            _tell(subject, now, [checkpoint], why, findings)
    if blocks:
        needed = needed_blocks(storages, now)
        for ref, why in blocks.items():
            needing = [number for number, refs in needed.items() if not isinstance(refs, str) and ref in refs]
            if needing:
                _tell(subject, now, sorted(needing), why, findings)


def _tell(subject: Subject, history: History, checkpoints: list[int], why: str, findings: Findings) -> None:
    newest = history.latest is not None and history.latest.checkpoint in checkpoints
    numbers = ", ".join(map(str, checkpoints))
    storage = history.manifests[checkpoints[-1]].storage
    what, disks = (storage, "its disks") if storage else ("the topic", "the disks of the brokers")
    forever = [each for each in checkpoints if each in history.savepoints]
    ends = " ".join(when_given_up(subject.name, each) for each in forever) or "it goes when the checkpoint expires"
    findings.add(
        "blocks", f"Damaged in {storage or subject.checkpoint_topic}: {why}",
        whose=f"checkpoint {numbers}, the newest among them: no run can go on from it" if newest
        else f"checkpoint {numbers}: nothing can be restored from it, and a run does without",
        do=f"restore {what} from a replica or a backup, or `exactlyonce reset {subject.name}`; look at {disks}"
        if newest else f"look at {disks}; {ends[0].lower()}{ends[1:]}",
    )  # fmt: skip


def _orphans(subject: Subject, newest: Manifest, found: BlockSurvey, findings: Findings) -> None:
    """A running pipeline's blocks behind its last checkpoint are on their way to the next one."""
    if found.damaged:
        findings.not_checked("orphans", "which blocks a damaged checkpoint stands on is not known")
        return
    behind, before = list[BlockRef](), list[BlockRef]()
    for storage, ref in found.unclaimed:
        key = BlockKey.parse(ref.key)
        if key is not None and storage == TOPIC and ref.offset < found.first_places[ref.partition]:
            before += [ref] if key.checkpoint <= newest.checkpoint else []
        else:
            behind.append(ref)
    if behind and not subject.sign_of_life:
        findings.add(
            "blocks", f"{_counted(behind)} of no checkpoint: orphans of a run that was ended in the middle", level=NOTE,
            whose=_makers(behind), do=f"nothing: the next run of {subject.name} drops them",
        )  # fmt: skip
    if before:
        findings.add(
            "blocks", f"{_counted(before)} of no checkpoint, where no run looks for orphans any more: they stay, and "
            f"only take room", level=PROBLEM, whose=_makers(before),
            do="report it as a defect of exactlyonce; nothing else is affected",
        )  # fmt: skip


def _counted(refs: list[BlockRef]) -> str:
    return f"{counted(len(refs), 'block')} ({shown_bytes(sum(ref.size for ref in refs))})"


def _makers(refs: list[BlockRef]) -> str:
    keys = [key for ref in refs if (key := BlockKey.parse(ref.key)) is not None]
    attempts = sorted({(key.incarnation, key.attempt) for key in keys})
    operators = ", ".join(sorted({key.operator for key in keys}))
    made = ", ".join(f"incarnation {incarnation} attempt {attempt}" for incarnation, attempt in attempts)
    return f"{operators} of this pipeline, written by {made}"
