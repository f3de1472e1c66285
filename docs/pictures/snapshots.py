"""The pictures of docs/algorithms.md: the algorithm says what is recorded in them, its checker what is wrong."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from chandy_lamport.algorithm import (
    ChandyLamport,
    Complete,
    Initiate,
    MarkerReceived,
    MessageReceived,
    RecordState,
    SendMarker,
    SnapshotEvent,
)
from chandy_lamport.cuts import CausalHistory, Cut, Violation
from drawing import Drawing

MARKER = "|"


class Arrow(NamedTuple):
    """What went down a channel, when it was sent and when it was taken."""

    what: str
    channel: str
    sent_at: float
    taken_at: float


class Story:
    """A run of the algorithm, step by step; a step is told where it happens and at which x."""

    def __init__(self, channels: Mapping[str, tuple[str, str]]) -> None:
        processes = dict.fromkeys(process for ends in channels.values() for process in ends)
        self.channels = channels
        self.history = CausalHistory(processes, channels)
        self.queues: dict[str, deque[tuple[str, float]]] = {channel: deque() for channel in channels}
        self.arrows: list[Arrow] = []
        self.recorded_at: dict[str, float] = {}
        self.positions: dict[str, int] = {}
        self.in_flight: dict[str, tuple[str, ...]] = {}
        self._processes = {
            process: ChandyLamport(
                inputs=[channel for channel, (_, receiver) in channels.items() if receiver == process],
                outputs=[channel for channel, (sender, _) in channels.items() if sender == process],
            )
            for process in processes
        }

    def initiate(self, process: str, at: float) -> None:
        self._do(process, Initiate(1), at)

    def send(self, channel: str, message: str, at: float) -> None:
        self.history.sent(channel, message)
        self.queues[channel].append((message, at))

    def take(self, channel: str, at: float) -> None:
        """The receiver takes what lies first on the channel, and hands a marker to the algorithm at once."""
        first, _ = self.queues[channel][0]
        take = self.take_marker if first == MARKER else self.take_message
        take(channel, at)

    def take_message(self, channel: str, at: float) -> None:
        """The receiver takes the first message, also from behind a marker."""
        message, sent_at = next(each for each in self.queues[channel] if each[0] != MARKER)
        self.queues[channel].remove((message, sent_at))
        self._do(self.channels[channel][1], MessageReceived(channel, message), at)
        self.history.received(channel, message)
        self.arrows.append(Arrow(message, channel, sent_at, at))

    def take_marker(self, channel: str, at: float) -> None:
        marker, sent_at = next(each for each in self.queues[channel] if each[0] == MARKER)
        self.queues[channel].remove((marker, sent_at))
        self._do(self.channels[channel][1], MarkerReceived(channel, 1), at)
        self.arrows.append(Arrow(marker, channel, sent_at, at))

    @property
    def recorded(self) -> set[str]:
        """The messages that are in the snapshot's channels."""
        return {message for messages in self.in_flight.values() for message in messages}

    def violations(self, **positions: int) -> list[Violation]:
        """What the checker says of the cut, with other *positions* than the algorithm's."""
        return self.history.violations(Cut(self.positions | positions, self.in_flight))

    def _do(self, process: str, event: SnapshotEvent, at: float) -> None:
        for action in self._processes[process].handle(event):
            match action:
                case RecordState():
                    self.recorded_at[process] = at
                    self.positions[process] = self.history.position(process)
                case SendMarker(_, channel):
                    self.queues[str(channel)].append((MARKER, at))
                case Complete(_, channels):
                    self.in_flight.update({str(channel): messages for channel, messages in channels.items()})


# --- a consistent cut, and one that is not ----------------------------------------------------------------------------

LANES = {"p": 0, "q": 1, "r": 2}


def _three() -> Story:
    """Three processes; p initiates."""
    story = Story({"p->q": ("p", "q"), "q->p": ("q", "p"), "q->r": ("q", "r"), "r->p": ("r", "p")})
    story.send("p->q", "m1", 60)
    story.take("p->q", 150)
    story.send("q->r", "m2", 190)
    story.send("r->p", "m3", 215)
    story.initiate("p", 260)
    story.send("q->p", "m4", 300)
    story.send("p->q", "m5", 330)
    story.take("p->q", 390)
    story.take("q->r", 420)
    story.take("q->p", 440)
    story.take("p->q", 470)
    story.take("r->p", 500)
    story.take("q->r", 540)
    story.send("q->r", "m6", 580)
    story.take("q->p", 590)
    story.take("r->p", 660)
    story.take("q->r", 700)
    return story


def cuts() -> str:
    """Three processes in time, the cut that the algorithm makes, and one with a single state recorded too late."""
    drawing = Drawing(1060, 630, "A consistent cut made by markers, and an inconsistent one")
    story = _three()
    _space_and_time(drawing, 40, story, dict(story.recorded_at), set())
    drawing.text(20, 30, "What the algorithm records", "strong")
    _legend(drawing, story)
    late = 495.0
    wrong = story.violations(q=story.positions["q"] + 1)
    drawing.text(20, 340, "The same history, with the state of q recorded after its next message", "strong")
    _space_and_time(drawing, 350, story, story.recorded_at | {"q": late}, {each.message for each in wrong})
    drawing.lines(780, 400, ("The checker:", *_folded(str(wrong[0]))))
    drawing.lines(780, 500, ("Restored from this, p would", "send m5 again, and q would", "count it twice."))
    return drawing.svg()


def _folded(sentence: str) -> list[str]:
    """A sentence in lines of at most 32 characters."""
    lines = [""]
    for word in sentence.split():
        lines = [*lines, word] if len(lines[-1]) + len(word) > 31 else [*lines[:-1], f"{lines[-1]} {word}".strip()]
    return lines


def _legend(drawing: Drawing, story: Story) -> None:
    drawing.path([(780, 75), (830, 75)])
    drawing.text(840, 79, "message")
    drawing.path([(780, 100), (830, 100)], style="thin")
    drawing.text(840, 104, "marker")
    drawing.band(780, 116, 50, 18, "green")
    drawing.text(840, 129, "cut: where states are recorded")
    drawing.band(780, 141, 50, 18, "amber")
    drawing.text(840, 154, f"on its way at the cut: {', '.join(sorted(story.recorded))}")
    drawing.lines(780, 190, ("p initiates. On every channel a marker", "divides what was sent before the cut"))
    drawing.text(780, 224, "from what is sent after it.")


def _space_and_time(drawing: Drawing, top: float, story: Story, cut: Mapping[str, float], wrong: set[str]) -> None:
    """Processes from top to bottom, time from left to right, the messages that are *wrong* in red."""
    height = {process: top + 50 + 90 * lane for process, lane in LANES.items()}
    points = [(40 + cut[process], height[process]) for process in LANES]
    (first_x, first_y), (last_x, last_y) = points[0], points[-1]
    drawing.ribbon([(first_x, first_y - 34), *points, (last_x, last_y + 34)], "green")
    for process in LANES:
        drawing.text(20, height[process] + 4, process, "strong")
        drawing.path([(40, height[process]), (760, height[process])])
    for arrow in story.arrows:
        sender, receiver = story.channels[arrow.channel]
        start, end = (40 + arrow.sent_at, height[sender]), (40 + arrow.taken_at, height[receiver])
        drawing.path([start, end], style="thin" if arrow.what == MARKER else "line")
        if arrow.what != MARKER:
            colour = "red" if arrow.what in wrong else "amber" if arrow.what in story.recorded else "grey"
            x, y = start[0] + 0.3 * (end[0] - start[0]), start[1] + 0.3 * (end[1] - start[1])
            drawing.box(x - 14, y - 10, 28, 20, colour)
            drawing.text(x, y + 5, arrow.what, anchor="middle")


# --- three modes of one subtask -------------------------------------------------------------------------------------

ARRIVALS: dict[str, dict[str, float]] = {
    "A": {"a1": 0, MARKER: 2, "a2": 3, "a3": 5},
    "B": {"b1": 1, "b2": 4, "b3": 6, MARKER: 7, "b4": 8},
}
"""By input: in which order its records and its barrier arrive."""
WIDTH, LEFT = 58, 150


class Mode(NamedTuple):
    """A way to take what arrives: the items, each with the place at which it is taken, and what that costs."""

    name: str
    taken: Mapping[str, float]
    costs: tuple[str, ...]


MODES = (
    Mode(
        "aligned",
        {"a1": 0, "b1": 1, "b2": 4, "b3": 6, "|A": 7, "|B": 7, "a2": 7.7, "a3": 8.7, "b4": 9.7},
        ("A is held back for B's barrier", "recorded: the state", "after a crash: nothing twice"),
    ),
    Mode(
        "unaligned",
        {"a1": 0, "b1": 1, "|A": 2, "a2": 3, "b2": 4, "a3": 5, "b3": 6, "|B": 7, "b4": 8},
        ("nothing is held back", "recorded: the state, b2, b3", "after a crash: nothing twice"),
    ),
    Mode(
        "at least once",
        {"a1": 0, "b1": 1, "a2": 3, "b2": 4, "a3": 5, "b3": 6, "|A": 7, "|B": 7, "b4": 8},
        ("nothing is held back", "recorded: the state", "after a crash: a2, a3 again"),
    ),
)


def _taking(mode: Mode) -> Story:
    """The subtask s takes, as *mode* says, what its inputs have sent."""
    story = Story({"A": ("a", "s"), "B": ("b", "s")})
    for channel, items in ARRIVALS.items():
        for item, at in items.items():
            if item == MARKER:
                story.initiate(channel.lower(), at)
            else:
                story.send(channel, item, at)
    for item, at in mode.taken.items():
        if item.startswith(MARKER):
            story.take_marker(item[1:], at)
        else:
            story.take_message(item[0].upper(), at)
    return story


def modes() -> str:
    """What one subtask takes when, in each mode, while the same arrives."""
    drawing = Drawing(1060, 560, "One subtask with two inputs, aligned, unaligned and at least once")
    for row, mode in enumerate(MODES):
        _mode(drawing, mode, 20 + 165 * row)
    x, y = 20.0, 520
    for colour, words in (
        ("paper", "held back"),
        ("blue", "in the state"),
        ("amber", "recorded beside it, taken first after a crash"),
        ("red", "in it, and read again after a crash"),
        ("grey", "after it"),
    ):
        drawing.box(x, y, 28, 20, colour)
        drawing.text(x + 36, y + 15, words)
        x += 58 + 6.6 * len(words)
    return drawing.svg()


def _mode(drawing: Drawing, mode: Mode, top: float) -> None:
    story = _taking(mode)
    doubled = {each.message for each in story.violations()}
    recorded_at = LEFT + WIDTH * story.recorded_at["s"] + 15
    drawing.text(20, top + 70, mode.name, "strong")
    drawing.lines(850, top + 53, mode.costs)
    drawing.ribbon([(recorded_at, top + 6), (recorded_at, top + 128)], "green")
    drawing.text(recorded_at, top + 142, "state recorded", anchor="middle")
    for channel, items in ARRIVALS.items():
        y = top + (20 if channel == "A" else 75)
        drawing.text(LEFT + 15 - WIDTH, y + 22, channel, "strong", "middle")
        drawing.path([(LEFT + 25 - WIDTH, y + 18), (LEFT + 11.5 * WIDTH, y + 18)], tip=False, style="thin")
        for item, at in items.items():
            x = LEFT + WIDTH * at
            if item == MARKER:
                drawing.band(x + 12, y, 6, 36, "ink")
                continue
            taken_x = LEFT + WIDTH * mode.taken[item]
            if taken_x > x:
                drawing.box(x - 3, y + 4, 36, 28, "paper")
                drawing.text(x + 15, y + 22, item, "faint", "middle")
                under = y + 40 + 2 * at
                drawing.path([(x + 15, y + 32), (x + 15, under), (taken_x + 15, under), (taken_x + 15, y + 34)])
            before = story.recorded_at["s"] > mode.taken[item]
            colour = "red" if item in doubled else "amber" if item in story.recorded else "blue" if before else "grey"
            drawing.box(taken_x - 3, y + 4, 36, 28, colour)
            drawing.text(taken_x + 15, y + 22, item, anchor="middle")


# --- a cycle ----------------------------------------------------------------------------------------------------------


def _round() -> Story:
    """1 and 2 are on their way back to the head when its barrier comes, 3 is on its way into the loop."""
    story = Story({"in": ("source", "head"), "on": ("head", "body"), "back": ("body", "head")})
    for message in ("1", "2"):
        story.send("back", message, 0)
    story.send("on", "3", 0)
    story.initiate("source", 1)
    for channel in ("in", "on"):
        story.take(channel, 2)
    story.send("back", "3 again", 3)
    for channel in ("on", "back", "back", "back", "back"):
        story.take(channel, 4)
    return story


def cycle() -> str:
    """A loop head that has recorded its state, and logs what comes round until its own barrier does."""
    drawing = Drawing(1060, 300, "A loop: the head logs what comes on feedback until its barrier has come round")
    boxes = ((20, "source", "state recorded"), (300, "head", "state recorded"), (640, "body", "not yet"))
    for x, name, words in (*boxes, (900, "sink", "not yet")):
        drawing.box(x, 50, 140, 60, "blue" if words == "not yet" else "green")
        drawing.text(x + 70, 75, name, "strong", "middle")
        drawing.text(x + 70, 95, words, anchor="middle")
    for start, end in ((160, 300), (440, 640), (780, 900)):
        drawing.path([(start, 80), (end, 80)])
    drawing.path([(710, 110), (710, 190), (370, 190), (370, 110)])
    log = _round().in_flight["back"]
    loop = {number: (name, "amber" if name in log else "grey") for number, name in ((440, "1"), (550, "2"))}
    _items(drawing, 80, {210: ("5", "grey")})
    _items(drawing, 80, {470: ("4", "grey"), 515: (MARKER, "ink"), 560: ("3", "blue")})
    _items(drawing, 190, loop)
    drawing.text(230, 40, "ordinary: aligned", anchor="middle")
    drawing.text(530, 40, "the barrier goes on", anchor="middle")
    drawing.text(540, 225, f"feedback: the head logs {', '.join(log)}", anchor="middle")
    drawing.text(540, 250, "until its barrier comes round behind them", anchor="middle")
    drawing.text(540, 285, "What was in the loop is in the snapshot, once: in a state, or in the log.", anchor="middle")
    return drawing.svg()


def _items(drawing: Drawing, y: float, items: Mapping[int, tuple[str, str]]) -> None:
    for x, (item, colour) in items.items():
        if item == MARKER:
            drawing.band(x + 12, y - 18, 6, 36, colour)
        else:
            drawing.box(x, y - 12, 30, 24, colour)
            drawing.text(x + 15, y + 5, item, anchor="middle")
