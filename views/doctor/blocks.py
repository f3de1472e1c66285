"""The blocks of checkpoints in all storages: damaged ones, and those that no manifest needs."""

from __future__ import annotations

from contextlib import closing

from exactlyonce.checkpoint.kept_blocks import when_given_up
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
    """Look at indexes and places; if *deep*, read every block and compare it with its SHA-256."""
    history, newest = subject.history, subject.newest
    if history is None or newest is None:
        return
    what = "all blocks" if deep else "indexes of blocks, and orphans after the last checkpoint"
    with findings.checking(what):
        topic = find_topic(subject.config, subject.name)
        with closing(Storages(subject.config, topic)) as storages:
            blocks = survey(storages, history, deep=deep)
            damaged = _damaged_blocks(storages, blocks, history) if deep else {}
            _damage(subject, storages, blocks, damaged, findings)
            _orphans(subject, newest, blocks, findings)
            for storage, why in blocks.unreachable.items():
                findings.not_checked(f"what the pipeline has left in {storage}", why)
            for place in (place for scanned in blocks.scanned.values() for place in scanned.unreadable):
                findings.add(
                    "blocks", f"{place} cannot be read", whose="the checkpoint topic's",
                    do="look at the disks of the brokers; blocks that lie there cannot be removed",
                )  # fmt: skip
            if not deep:
                why = f"{counted(len(blocks.claimed), 'block')}: --deep reads them all"
                findings.not_checked("the bytes of blocks, and orphans before the last checkpoint", why)


def _damaged_blocks(storages: Storages, blocks: BlockSurvey, history: History) -> dict[BlockRef, str]:
    """The damaged blocks, each with its damage."""
    damaged = dict[BlockRef, str]()
    for storage in history.storages:
        retained = (manifest for manifest in history.retained if manifest.storage == storage)
        needed = (blocks.references[manifest.checkpoint] for manifest in retained)
        refs = {ref for refs in needed if not isinstance(refs, str) for ref in refs}
        damaged |= damaged_among(refs, storages.of(storage))
    return damaged


def _damage(
    subject: Subject, storages: Storages, blocks: BlockSurvey, damaged: dict[BlockRef, str], findings: Findings
) -> None:
    """Report damaged checkpoints, unless they have expired meanwhile."""
    if not blocks.damaged and not damaged:
        return
    now = subject.history_now
    assert now is not None  # it was read before
    for checkpoint, why in blocks.damaged.items():
        if checkpoint in now.manifests:
            _report(subject, now, [checkpoint], why, findings)
    if damaged:
        needed = needed_blocks(storages, now, now.retained)
        for ref, why in damaged.items():
            needing = [number for number, refs in needed.items() if not isinstance(refs, str) and ref in refs]
            if needing:
                _report(subject, now, sorted(needing), why, findings)


def _report(subject: Subject, history: History, checkpoints: list[int], why: str, findings: Findings) -> None:
    newest = history.latest is not None and history.latest.checkpoint in checkpoints
    numbers = ", ".join(map(str, checkpoints))
    storage = history.manifests[checkpoints[-1]].storage
    what, disks = (storage, "its disks") if storage else ("the topic", "the disks of the brokers")
    savepoints = [number for number in checkpoints if number in history.savepoints]
    ends = " ".join(when_given_up(subject.name, number) for number in savepoints)
    ends = ends or "it goes when the checkpoint expires"
    findings.add(
        "blocks", f"Damaged in {storage or subject.checkpoint_topic}: {why}",
        whose=f"checkpoint {numbers}, the newest among them: no run can go on from it" if newest
        else f"checkpoint {numbers}: nothing can be restored from it, and a run does without",
        do=f"restore {what} from a replica or a backup, or `exactlyonce reset {subject.name}`; look at {disks}"
        if newest else f"look at {disks}; {ends[0].lower()}{ends[1:]}",
    )  # fmt: skip


def _orphans(subject: Subject, newest: Manifest, blocks: BlockSurvey, findings: Findings) -> None:
    """Report orphans. A running pipeline's blocks after its last checkpoint belong to the next one."""
    if blocks.damaged:
        findings.not_checked("orphans", "which blocks a damaged checkpoint stands on is not known")
        return
    after, before = list[BlockRef](), list[BlockRef]()
    for storage, ref in blocks.unclaimed:
        key = BlockKey.parse(ref.key)
        if key is not None and storage == TOPIC and ref.offset < blocks.first_places[ref.partition]:
            before += [ref] if key.checkpoint <= newest.checkpoint else []
        else:
            after.append(ref)
    if after and not subject.sign_of_life:
        findings.add(
            "blocks", f"{_counted(after)} of no checkpoint: orphans of a run that was ended in the middle", level=NOTE,
            whose=_writers(after), do=f"nothing: the next run of {subject.name} drops them",
        )  # fmt: skip
    if before:
        findings.add(
            "blocks", f"{_counted(before)} of no checkpoint, where no run looks for orphans any more: they stay, and "
            f"only take room", level=PROBLEM, whose=_writers(before),
            do="report it as a defect of exactlyonce; nothing else is affected",
        )  # fmt: skip


def _counted(refs: list[BlockRef]) -> str:
    return f"{counted(len(refs), 'block')} ({shown_bytes(sum(ref.size for ref in refs))})"


def _writers(refs: list[BlockRef]) -> str:
    keys = [key for ref in refs if (key := BlockKey.parse(ref.key)) is not None]
    attempts = sorted({(key.incarnation, key.attempt) for key in keys})
    operators = ", ".join(sorted({key.operator for key in keys}))
    writers = ", ".join(f"incarnation {incarnation} attempt {attempt}" for incarnation, attempt in attempts)
    return f"{operators} of this pipeline, written by {writers}"
