"""The pictures of the documentation as SVG: `python docs/pictures/draw.py` writes them beside this file.

Invariant: a picture is a function of the files here and of the tables, keys and algorithms of the code;
tests/test_pictures.py compares what is checked in with what is drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from drawing import Drawing
from snapshots import cuts, cycle, modes

from exactlyonce.checkpoint.records.encoding import BlockKey, DecisionKey
from exactlyonce.checkpoint.records.manifest import Finalized, Incarnation, Manifest, Repair, TopicInfo
from exactlyonce.sinks.kafka.writer import SLOT_TRANSITIONS, SlotState

HERE = Path(__file__).parent


class Step(NamedTuple):
    """One row of the timeline: who tells whom, or, where both are the same, who does something alone."""

    sender: int
    receiver: int
    words: str


LANES = ("coordinator", "source subtask", "keyed subtask, sink", "output topics", "checkpoint topic", "reader")
COORDINATOR, SOURCE, SINK, OUTPUT, DECISIONS, READER = range(6)
PHASES: tuple[tuple[str, str, tuple[Step, ...]], ...] = (
    (
        "in flight: after a crash, n never happened",
        "blue",
        (
            Step(COORDINATOR, SOURCE, "1  trigger n"),
            Step(SOURCE, SOURCE, "notes Sn, between two batches"),
            Step(SOURCE, SINK, "2  barrier n, behind its records"),
            Step(SINK, SINK, "aligns, freezes its changes"),
            Step(SINK, OUTPUT, "3  flushes its transaction"),
            Step(SINK, DECISIONS, "blocks: state, index, order log"),
            Step(SOURCE, COORDINATOR, "4  acknowledges Sn"),
            Step(SINK, COORDINATOR, "4  acknowledges blocks and pre-commit"),
        ),
    ),
    (
        "decision",
        "amber",
        (
            Step(COORDINATOR, OUTPUT, "5  checks: Ongoing, same epoch, time left, the count"),
            Step(COORDINATOR, DECISIONS, "6  manifest n, in the coordinator's own transaction"),
        ),
    ),
    (
        "decided: whoever leads must commit it, however often anything crashes",
        "green",
        (
            Step(COORDINATOR, OUTPUT, "7  EndTxn(commit) for each committable; markers are there"),
            Step(OUTPUT, READER, "visible"),
            Step(COORDINATOR, DECISIONS, "8  finalized n, tombstones of what nobody needs"),
            Step(COORDINATOR, SINK, "9  transactional ids of n are free again"),
        ),
    ),
)


def barrier() -> str:
    """The timeline of one barrier, from trigger to finalized."""
    lane, left, row, top = 172, 96, 38, 62
    rows = sum(len(steps) for _, _, steps in PHASES)
    bottom = top + rows * row + len(PHASES) * 34
    drawing = Drawing(left * 2 + lane * 5, bottom + 26, "Timeline of a barrier, from trigger to finalized")
    y = float(top)
    for _, colour, steps in PHASES:
        drawing.band(10, y, left * 2 + lane * 5 - 20, 30 + len(steps) * row, colour)
        y += len(steps) * row + 34
    for number, who in enumerate(LANES):
        x = left + lane * number
        drawing.path([(x, 40), (x, bottom)], tip=False, style="thin")
        drawing.box(x - 82, 12, 164, 28, "grey")
        drawing.text(x, 31, who, "strong", "middle")
    y = float(top)
    for name, colour, steps in PHASES:
        drawing.band(16, y + 4, 8 * len(name), 20, colour)
        drawing.text(20, y + 19, name, "strong")
        y += 30
        for step in steps:
            _step(drawing, step, left, lane, y, colour)
            y += row
        y += 4
    return drawing.svg()


def _step(drawing: Drawing, step: Step, left: int, lane: int, y: float, colour: str) -> None:
    start, end = left + lane * step.sender, left + lane * step.receiver
    if start == end:
        drawing.band(start - 4, y + 2, 8, 26, "ink")
        width = 7.2 * len(step.words)
        drawing.band(start + 9, y + 6, width, 18, colour)
        drawing.text(start + 12, y + 20, step.words)
        return
    nearest = min(start, end)
    drawing.band(nearest + 7, y + 1, 7.2 * len(step.words), 18, colour)
    drawing.text(nearest + 10, y + 15, step.words)
    drawing.path([(start, y + 24), (end, y + 24)])


SLOT_WORDS = {
    SlotState.FREE: "id unused",
    SlotState.PREPARING: "init_transactions",
    SlotState.PREPARED: "has its epoch",
    SlotState.READY: "coordinator knows",
    SlotState.WRITING: "open: records of n",
    SlotState.DRAINING: "barrier n: flush",
    SlotState.PRECOMMITTED: "acknowledged",
}


def committable() -> str:
    """The life of a committable: the states of its transactional id, and below them its way to an end."""
    drawing = Drawing(1060, 605, "Life of a committable, from a free transactional id to committed, repaired or halt")
    drawing.text(20, 30, "In the worker: the slots of one sink subtask", "strong")
    states = [SlotState.FREE]
    while SLOT_TRANSITIONS[states[-1]] is not states[0]:
        states.append(SLOT_TRANSITIONS[states[-1]])
    width, gap = 130, 18
    for number, state in enumerate(states):
        x = 20 + number * (width + gap)
        drawing.box(x, 48, width, 52, "blue")
        drawing.text(x + width / 2, 70, state.value, "strong", "middle")
        drawing.text(x + width / 2, 89, SLOT_WORDS[state], anchor="middle")
        if number:
            drawing.path([(x - gap, 74), (x, 74)])
    last = 20 + (len(states) - 1) * (width + gap) + width / 2
    drawing.path([(last - 30, 100), (last - 30, 122), (85, 122), (85, 100)])
    drawing.text(470, 140, "checkpoint n is finalized", anchor="middle")
    drawing.text(20, 178, "In the coordinator: what it flushed for n, until n is finalized", "strong")
    _decided(drawing, last)
    _ends(drawing)
    return drawing.svg()


def _named(drawing: Drawing, x: float, y: float, width: float, colour: str, name: str, *words: str) -> None:
    drawing.box(x, y, width, 32 + 17 * len(words), colour)
    drawing.text(x + width / 2, y + 21, name, "strong", "middle")
    drawing.lines(x + width / 2, y + 39, words, anchor="middle")


def _decided(drawing: Drawing, last: float) -> None:
    """From flushed to named by a manifest, and what becomes of it otherwise."""
    drawing.path([(last + 30, 100), (last + 30, 200)])
    _named(drawing, 830, 200, 210, "amber", "checked", "Ongoing, same epoch,", "the broker's own count")
    _named(drawing, 500, 200, 230, "green", "named by manifest n", "from here on it must", "be committed")
    drawing.path([(830, 233), (730, 233)])
    drawing.text(780, 225, "durable", anchor="middle")
    _named(drawing, 830, 318, 210, "red", "aborted", "no manifest names it:", "the next sweep ends it")
    drawing.path([(935, 266), (935, 318)])
    drawing.lines(945, 288, ("n refused:", "the job restarts"))
    _named(drawing, 20, 200, 190, "green", "committed", "markers are there")
    drawing.path([(500, 228), (210, 228)])
    drawing.text(355, 220, "EndTxn(commit): 0", anchor="middle")


def _ends(drawing: Drawing) -> None:
    """What an EndTxn that did not answer 0 leads to."""
    _named(drawing, 500, 330, 230, "amber", "looked at", "its records, behind the", "last stable offset")
    drawing.path([(570, 266), (570, 330)])
    drawing.text(580, 303, "unknown answer, or markers lost")
    _named(drawing, 20, 330, 190, "green", "proven", "its records are visible")
    drawing.path([(500, 358), (210, 358)])
    drawing.text(355, 350, "seen read_committed", anchor="middle")
    _named(drawing, 380, 450, 230, "red", "lost", "the broker aborted it:", "timeout, lost markers")
    drawing.path([(560, 396), (560, 450)])
    drawing.text(570, 428, "seen read_uncommitted alone")
    drawing.path([(520, 266), (520, 290), (440, 290), (440, 450)])
    drawing.text(430, 310, "INVALID_TXN_STATE: refused", anchor="end")
    _named(drawing, 20, 450, 220, "green", "repaired", "copied, or else replayed, into", "a transaction named first")
    drawing.path([(380, 483), (240, 483)])
    drawing.lines(310, 475, ("repair n/k",), anchor="middle")
    _named(drawing, 780, 450, 260, "red", "halt", "says which records and the", "choices; or: loss accepted")
    drawing.path([(730, 363), (795, 363), (795, 450)])
    drawing.text(805, 435, "neither is seen: gone")
    drawing.path([(610, 483), (780, 483)])
    drawing.lines(695, 475, ("no copy, no replay",), anchor="middle")
    drawing.lines(
        20, 550,
        (
            "n is finalized once every committable of it is committed, proven or repaired, or its loss accepted.",
            "The live commit, recovery and Spark run the same lines: checkpoint/commits/, checkpoint/transactions/.",
            "Where n is aborted and the job goes on, the manifest of n+1 names what was flushed for n as well.",
        ),
    )  # fmt: skip


KEPT = {
    "offsets": "Sn by partition, with topic id and leader epoch",
    "operators": "index blocks by subtask, with their SHA-256",
    "order_logs": "the order in which inputs were taken",
    "committables": "id, producer id, epoch, first offsets and counts",
    "block_end_offsets": "from where orphans are looked for",
}
"""Fields of a manifest, and what is in them."""


def _key(kind: type[Incarnation] | type[Manifest] | type[Finalized] | type[Repair], number: int, of: int = 0) -> str:
    return str(DecisionKey(kind, number, of))


def topic() -> str:
    """The layout of the checkpoint topic: decisions in partition 0, blocks in the others."""
    drawing = Drawing(1060, 520, "Layout of the checkpoint topic: partition 0 with decisions, the others with blocks")
    info = TopicInfo("order-totals.checkpoints", "", partitions=4, replicas=1)
    drawing.text(20, 30, info.name, "strong")
    drawing.text(235, 30, "compacted, nothing is deleted by age or size; a record's key is what stands in its box")
    drawing.text(20, 66, "partition 0: decisions, only by the coordinator's transactional producer", "strong")
    row = (
        (_key(Incarnation, 3), "grey", "who leads"),
        (_key(Manifest, 17), "green", "decision"),
        (_key(Finalized, 17), "green", "all committed"),
        (_key(Manifest, 18), "green", "decision"),
        (_key(Repair, 18, 1), "amber", "stands in"),
        (_key(Finalized, 18), "green", "all committed"),
        (_key(Manifest, 16), "grey", "tombstone"),
        (_key(Finalized, 16), "grey", "tombstone"),
    )
    places = {key: 78.0 + 129 * number for number, (key, _, _) in enumerate(row)}
    for key, colour, word in row:
        drawing.box(places[key] - 58, 80, 116, 46, colour)
        drawing.text(places[key], 100, key, "mono", "middle")
        drawing.text(places[key], 118, word, anchor="middle")
    first, last = places[_key(Finalized, 18)], places[_key(Finalized, 16)]
    drawing.path([(first, 126), (first, 134), (last, 134), (last, 126)], tip=False)
    drawing.text((first + last) / 2, 150, "one transaction: finalized, and what goes with it", anchor="middle")
    _manifest(drawing, places[_key(Manifest, 18)])
    _blocks(drawing, info)
    return drawing.svg()


def _manifest(drawing: Drawing, x: float) -> None:
    """What a manifest holds."""
    drawing.path([(x, 126), (x, 164)])
    drawing.box(20, 164, 560, 30 + 20 * len(KEPT), "green")
    drawing.text(32, 183, "a manifest holds references, never state (256 KiB a record)", "strong")
    for number, (field, words) in enumerate(KEPT.items()):
        drawing.text(32, 204 + 20 * number, field, "mono")
        drawing.text(180, 204 + 20 * number, words)
    drawing.lines(
        610, 190,
        (
            "Readers of partition 0 read committed. A decision",
            "counts once the last stable offset has passed it.",
            "Blocks are read uncommitted: that one is there",
            "means nothing, only a manifest makes it part of",
            "a checkpoint.",
        ),
    )  # fmt: skip


def _blocks(drawing: Drawing, info: TopicInfo) -> None:
    """The block partitions, and what a key says."""
    drawing.path([(170, 294), (170, 352)])
    drawing.text(182, 322, "index and order log are named here; the index names the blocks of state")
    rows: dict[int, list[tuple[BlockKey, str, str]]] = {number: [] for number in range(1, info.partitions)}
    for operator, group, part, kind, colour in (
        ("totals", 0, 3, "index", "blue"),
        ("totals", 3, 1, "state", "blue"),
        ("totals", 4, 2, "state", "blue"),
        ("totals", 1, 5, "orphan", "red"),
        ("orders", 2, 4, "order log", "blue"),
    ):
        key = BlockKey(3, 19 if kind == "orphan" else 18, operator, group, part, 0, f"{0x9F2C + part * 0x111:x}")
        rows[info.partition_of(group)].append((key, kind, colour))
    for number, keys in rows.items():
        y = 352 + 38 * (number - 1)
        drawing.text(20, y + 20, f"partition {number}", "strong")
        for place, (key, kind, colour) in enumerate(keys):
            drawing.box(110 + 330 * place, y, 320, 30, colour)
            drawing.text(120 + 330 * place, y + 19, str(key), "mono")
            drawing.text(420 + 330 * place, y + 19, kind, anchor="end")
    drawing.lines(
        20, 482,
        (
            "A block's key: block / incarnation / checkpoint / operator / key group / part / attempt-random. It is",
            "written once, to the partition of its key group. An orphan, which no manifest names, gets a tombstone.",
        ),
    )  # fmt: skip


PICTURES: dict[str, Callable[[], str]] = {
    "barrier.svg": barrier,
    "committable.svg": committable,
    "checkpoint-topic.svg": topic,
    "consistent-cut.svg": cuts,
    "barrier-modes.svg": modes,
    "cycle.svg": cycle,
}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (HERE / name).write_text(draw())
