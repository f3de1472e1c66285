"""`exactlyonce top`: a pipeline in a terminal, drawn anew every second. It only reads, and fences nobody."""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING

from exactlyonce.cli import text
from exactlyonce.cli.arguments import Parser, add_cluster, add_pipeline_name, client, name_and_graph, set_command
from exactlyonce.pipeline.durations import shown_duration
from exactlyonce.pipeline.extras import needing
from exactlyonce.pipeline.sizes import shown_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

    from exactlyonce.engines.local.monitoring.page import PipelineState, ShownCheckpoint

_EXAMPLES = """\
Show a pipeline, or a sink of Spark, in a terminal, anew every second: whether it is well,
its last checkpoints, the partitions that lag most, its open transactions and what happened
to it. All of it comes from the checkpoint topic and the brokers, so it works from any
machine, and also while nothing runs. A running pipeline is not disturbed. Ctrl-C ends it.
Without a terminal, or with --json, it shows the pipeline once and ends.

examples:
  exactlyonce top order-totals
  exactlyonce top order-totals --json
"""
LOOK_S = 1.0
ROWS = 8
"""The lines of each table, at most."""
_CHECKPOINT_COLUMNS = (">id", "kind", ">took", ">written", ">state", ">records", "slowest, or why it was aborted")
BARS = "▁▂▃▄▅▆▇█"


def add(parser: Parser) -> None:
    set_command(parser, "PIPELINE [options]", _EXAMPLES, top)
    add_pipeline_name(parser)
    parser.add_argument("--json", action="store_true", help="once, as one JSON document")
    add_cluster(parser)


def top(args: argparse.Namespace) -> int:
    from exactlyonce.engines.system_clock import SystemClock
    from exactlyonce.views.watch import Watch

    pipeline, graph = name_and_graph(args)
    with closing(Watch(client(args), pipeline, graph)) as watch:

        def look() -> PipelineState:
            return watch.look(SystemClock().now_ms())

        if args.json:
            print(text.document(look()))
            return 0
        with needing("top", "rich", "exactlyonce top"):
            from rich.console import Console
            from rich.live import Live
        console = Console(width=None if sys.stdout.isatty() else text.terminal_width(), highlight=False)
        if not console.is_terminal:
            console.print(drawn(look()))
            return 0
        with Live(drawn(look()), console=console, screen=True, auto_refresh=False) as live:
            pause = threading.Event()
            while not pause.wait(LOOK_S):
                live.update(drawn(look()), refresh=True)
    return 0


def drawn(state: PipelineState) -> RenderableType:
    """What `views.watch.Watch.look` has seen, for a terminal."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from exactlyonce.views.watch import ENDED, NEW

    def table(title: str, columns: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> Iterator[RenderableType]:
        shown = list(rows)
        if shown:
            drawing = Table(box=None, pad_edge=False, header_style="dim")
            for column in columns:
                drawing.add_column(column.lstrip(">"), justify="right" if column[0] == ">" else "left")
            for row in shown[:ROWS]:
                drawing.add_row(*row)
            yield from (Text(), Text(title, style="bold"), drawing)
            if len(shown) > ROWS:
                yield Text(f"and {len(shown) - ROWS:,} more", style="dim")

    style = "bold green" if state.well else "bold yellow" if state.state in (NEW, ENDED) else "bold red"
    figures, done = state.figures, state.checkpoints
    lines: list[RenderableType] = [
        Text(state.pipeline, style="bold"),
        Text(f"{'well' if state.well else 'not well'}: {state.sentence}", style=style),
    ]
    if state.cause:
        lines.append(Text(state.cause, style="yellow"))
    lag, transactions = map(_count, (figures["lag"], figures["open_transactions"]))
    lines += [
        Text(),
        Text(
            f"{figures['records_per_s']:,} records/s   lag {lag}   {transactions} open transactions   "
            f"incarnation {state.incarnation or '-'}"
        ),
    ]
    if state.as_of_ms not in (None, state.at_ms):
        age = shown_duration(state.at_ms - state.as_of_ms)
        lines.append(Text(f"all of this as it was {age} ago, at {text.moment(state.as_of_ms)}", style="yellow"))
    if done:
        durations_ms = [checkpoint.duration_ms or 0 for checkpoint in done]
        lines += [Text(), Text(f"{bars(durations_ms)}  checkpoints, {max(durations_ms):,} ms at most")]
    why = "slowest, or why it was aborted"
    lines += table(
        "last checkpoints", (">id", "kind", ">took", ">written", ">state", ">records", why), _checkpoints(done)
    )
    lines += table("partitions, the latest lag first", ("source", "partition", ">offset", ">lag"), _partitions(state))
    title = "open transactions, and output that waits for stores"
    columns = ("name", "state", ">open for", ">left", "decided", ">hidden from readers")
    lines += table(title, columns, _transactions(state))
    lines += table("what happened", ("at", "what"), ((text.moment(at), what) for at, what in state.notes))
    return Group(*lines)


def bars(values: list[int]) -> str:
    """*values* as bars of one line.

    >>> bars([1, 4, 8])
    '▁▄█'
    """
    longest = max(values, default=0)
    return "".join(BARS[min(len(BARS) - 1, value * len(BARS) // (longest + 1))] for value in values)


def _count(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"


def _checkpoints(done: list[ShownCheckpoint]) -> Iterator[tuple[str, ...]]:
    from exactlyonce.engines.local.monitoring.page import ABORTED

    for each in reversed(done):
        number, took = str(each.id), f"{each.duration_ms or 0:,} ms"
        if each.outcome == ABORTED:
            yield number, ABORTED, took, "-", "-", "-", each.reason or ""
        else:
            sizes = shown_bytes(each.bytes or 0), shown_bytes(each.state_bytes or 0)
            yield number, each.kind or "", took, *sizes, f"{each.records_committed or 0:,}", each.slowest or "-"


def _partitions(state: PipelineState) -> Iterator[tuple[str, ...]]:
    for each in sorted(state.partitions, key=lambda each: -(each.lag or 0)):
        yield each.source, f"{each.topic}[{each.partition}]", f"{each.offset or 0:,}", _count(each.lag)


def _transactions(state: PipelineState) -> Iterator[tuple[str, ...]]:
    for each in state.transactions:
        times = ("-" if each[name] is None else shown_duration(each[name]) for name in ("open_ms", "left_ms"))
        decided = "no" if each["decided_in"] is None else f"in checkpoint {each['decided_in']}"
        hidden = sum(place["hidden"] or 0 for place in each["written"])
        yield each["name"], each["state"], *times, decided, f"{hidden:,}"
