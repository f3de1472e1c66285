"""`exactlyonce transactions`: shows the waiting output of a pipeline, commits the decided part, aborts the rest.

Invariant: a refusal comes before anything is fenced.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from exactlyonce.cli import text
from exactlyonce.cli.arguments import Parser, add_action, add_cluster, add_pipeline_name, client, set_command
from exactlyonce.cli.text import note_for
from exactlyonce.pipeline.durations import shown_duration
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.sizes import counted

if TYPE_CHECKING:
    from exactlyonce.connectors.kafka.client_config import ClientConfig
    from exactlyonce.engines.pending_output import WaitingOutput
    from exactlyonce.engines.pipeline_resources import PipelineResources
    from exactlyonce.pipeline.graph import LogicalGraph

_EXAMPLES = """\
Show the waiting output of a pipeline or of a Spark sink: open transactions, and rows set
aside for stores, each with its age, the time until the broker aborts it, and the
checkpoint that decided it. Commit the decided part, or abort the rest. An open
transaction holds back all readers of its partitions. After a crash it stays open until
the broker's timeout, or until the pipeline runs again, which commits or aborts it.

examples:
  exactlyonce transactions list order-totals
  exactlyonce transactions describe order-totals eo:order-totals:out:0:1.1:1
  exactlyonce transactions commit order-totals
  exactlyonce transactions abort order-totals
"""
_LIST = """\
List the waiting output. Stores are asked only with module:pipeline, which names them.
Nothing is changed, and a running pipeline is not disturbed.
"""
_DESCRIBE = """\
Show the details of waiting output: offsets and records by partition, the writer, the
checkpoint that decided it, and what will happen to it. Nothing is changed.
"""
_COMMIT = """\
Finish the decided checkpoint, as the next run would: commit all its output, repair
transactions that the broker has aborted meanwhile, and mark it as finalized. A checkpoint
is one decision: its transactions and its rows for stores are committed together. With
TRANSACTION the command is refused unless that one is decided. It is refused while the
pipeline runs, which commits by itself; --take-over fences its coordinator, and it ends.
"""
_ABORT = """\
Abort the open transactions of a pipeline or of a Spark sink whose process has died, or
TRANSACTION alone. Decided output is left: the next run makes it visible. Nothing is lost:
aborted output is computed, or written, again. The command is refused while the pipeline
runs; --take-over fences its coordinator, and it ends. A Spark sink has no heartbeat while
its tasks work: an abort then fails its batch, which is written again.
"""
_COLUMNS = ("transaction", "state", ">open for", ">left", "decided")
_LABEL_WIDTH = 14
_INDENT = "    "


def add(parser: Parser) -> None:
    usage = "list|describe|commit|abort PIPELINE [options]"
    set_command(parser, usage, _EXAMPLES, show)
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True, prog=parser.prog)
    listing = add_action(actions, "list", "PIPELINE [options]", "list waiting output", _LIST, show)
    _add_arguments(listing, names="")
    usage = "PIPELINE TRANSACTION ... [options]"
    describing = add_action(actions, "describe", usage, "show the details", _DESCRIBE, describe)
    _add_arguments(describing, names="+")
    usage = "PIPELINE [TRANSACTION ...] [options]"
    for name, summary, about, command in (
        ("commit", "commit decided output", _COMMIT, commit),
        ("abort", "abort undecided output", _ABORT, abort),
    ):
        ending = add_action(actions, name, usage, summary, about, command)
        _add_arguments(ending, names="*")
        ending.add_argument("--take-over", action="store_true", help="even if an instance seems to be running")
    for action in actions.choices.values():
        add_cluster(action)


def _add_arguments(parser: Parser, names: str) -> None:
    add_pipeline_name(parser)
    if names:
        parser.add_argument("transactions", metavar="TRANSACTION", nargs=names, help="its name, as listed")
    parser.add_argument("--json", action="store_true", help="as one JSON document")


def show(args: argparse.Namespace) -> int:
    from exactlyonce.views.transactions import waiting_output

    config, resources, graph = _meant(args)
    waiting, unasked = waiting_output(config, resources, graph)
    _print(args, waiting, unasked)
    if not waiting and not args.json:
        print(f"{resources.pipeline} has no open transactions.")
    return 0


def describe(args: argparse.Namespace) -> int:
    from exactlyonce.connectors.kafka.transactions import Transactions
    from exactlyonce.engines.pending_output import TRANSACTION, with_offsets
    from exactlyonce.views.transactions import waiting_output

    config, resources, graph = _meant(args)
    waiting, unasked = waiting_output(config, resources, graph)
    by_name = {output.name: output for output in waiting}
    if missing := [name for name in args.transactions if name not in by_name]:
        unknown = "".join(f" The store of sink {sink} was not asked: {why}." for sink, why in unasked.items())
        raise ConfigError(
            f"{', '.join(missing)} is not waiting in {resources.pipeline}: it was ended, or never existed. "
            f"`exactlyonce transactions list {resources.pipeline}` lists the waiting output.{unknown}"
        )
    chosen = [by_name[name] for name in args.transactions]
    with closing(Transactions(config)) as transactions:
        chosen = [with_offsets(transactions, output) if output.kind == TRANSACTION else output for output in chosen]
    if args.json:
        print(json.dumps([{**output.figures(_now_ms()), "next": output.next} for output in chosen]))
        return 0
    for number, output in enumerate(chosen):
        print(*([""] if number else []), *in_full(output, _now_ms(), text.terminal_width()), sep="\n")
    return 0


def commit(args: argparse.Namespace) -> int:
    from exactlyonce.engines.pending_output import finish, require_decided, unfinished
    from exactlyonce.views.transactions import waiting_output

    config, resources, graph = _meant(args)
    require_decided(waiting_output(config, resources, graph).waiting, args.transactions)
    checkpoint, fates = None, dict[str, str]()
    if unfinished(resources, graph) is not None:
        _require_dead(args, resources)
        checkpoint, fates = finish(config, resources, graph, note_for(args), take_over=args.take_over)
    if args.json:
        print(json.dumps({"checkpoint": checkpoint, "fates": fates}))
    elif checkpoint is None:
        print(f"{resources.pipeline} has no decided output waiting: its last checkpoint is finalized.")
    else:
        if fates:
            print(*text.table(("transaction", "fate"), sorted(fates.items())), sep="\n")
        print(f"Checkpoint {checkpoint} is finalized: {counted(len(fates), 'transaction')} committed.")
    return 0


def abort(args: argparse.Namespace) -> int:
    from exactlyonce.engines.pending_output import abort_undecided, require_undecided
    from exactlyonce.views.transactions import waiting_output

    config, resources, graph = _meant(args)
    if args.transactions:  # also with the output that waits for stores, which `abort_undecided` does not know
        require_undecided(waiting_output(config, resources, graph).waiting, args.transactions)
    _require_dead(args, resources)
    aborted, left = abort_undecided(config, resources, args.transactions)
    now_ms = _now_ms()
    if args.json:
        document = {"aborted": aborted, "left": left}
        lists = {key: [output.figures(now_ms) for output in outputs] for key, outputs in document.items()}
        print(json.dumps(lists))
        return 0
    _print(args, [*aborted, *left], {})
    names = f": {', '.join(output.name for output in aborted)}" if left else ""
    print(f"{counted(len(aborted), 'transaction')} aborted{names or '.'}")
    decided = sum(output.is_decided for output in left)
    if decided:
        subject = "its query" if resources.is_sink else "the pipeline"
        print(f"{counted(decided, 'transaction')} decided, and left: run {subject}, which commits them.")
    if len(left) > decided:
        print(f"{counted(len(left) - decided, 'transaction')} left, which the command did not name.")
    return 0


def _meant(args: argparse.Namespace) -> tuple[ClientConfig, PipelineResources, LogicalGraph | None]:
    """The cluster, the pipeline's resources there, and its graph if its module was given."""
    from exactlyonce.cli.arguments import name_and_graph
    from exactlyonce.engines.pipeline_resources import find

    config = client(args)
    name, graph = name_and_graph(args)
    return config, find(config, name), graph


def _require_dead(args: argparse.Namespace, resources: PipelineResources) -> None:
    sign = resources.sign_of_life(_now_ms())
    if sign and not args.take_over:
        raise ConfigError(
            f"{resources.pipeline} may be running: {sign}. Stop it first, or add --take-over, which fences it: it then "
            f"ends without losing anything."
        )


def _print(args: argparse.Namespace, waiting: Sequence[WaitingOutput], unasked: Mapping[str, str]) -> None:
    now_ms = _now_ms()
    if args.json:
        document: list[dict[str, Any]] = [output.figures(now_ms) for output in waiting]
        document += [{"kind": "not known", "sink": sink, "why": why} for sink, why in unasked.items()]
        print(json.dumps(document))
        return
    if waiting:
        print(*as_table(waiting, now_ms, text.terminal_width()), sep="\n")
    for sink, why in unasked.items():
        print(text.wrapped(f"not known: the output waiting in the store of sink {sink}: {why}", text.terminal_width()))


def _now_ms() -> int:
    from exactlyonce.engines.system_clock import SystemClock

    return SystemClock().now_ms()


def as_table(waiting: Sequence[WaitingOutput], now_ms: int, width: int) -> Iterator[str]:
    """A row for each output, with its place below."""
    header, *rows = text.table(_COLUMNS, [_row(output, now_ms) for output in waiting])
    yield header
    for output, row in zip(waiting, rows, strict=True):
        yield row
        if summary := _summary(output):
            yield from text.labelled("", summary, 0, width, _INDENT)


def _row(output: WaitingOutput, now_ms: int) -> text.Row:
    times = (output.open_ms(now_ms), output.left_ms(now_ms))
    cells = ("" if time_ms is None else shown_duration(time_ms) for time_ms in times)
    return (output.name, output.state, *cells, _decided(output))


def _decided(output: WaitingOutput) -> str:
    return "no" if output.decided_in is None else f"in checkpoint {output.decided_in}"


def _summary(output: WaitingOutput) -> str:
    from exactlyonce.engines.pending_output import TRANSACTION

    parts = [] if output.kind == TRANSACTION else [f"sink {output.sink}, subtask {output.subtask}"]
    topics: dict[str, list[str]] = {}
    for place in output.places:
        topics.setdefault(place.topic, []).append(str(place.partition))
    parts.append(
        " ".join(f"{topic}[{','.join(partitions)}]" for topic, partitions in sorted(topics.items())) or output.where
    )
    if output.producer_id is not None:
        parts.append(f"producer {output.producer_id} epoch {output.epoch}")
    if output.checkpoint is not None:
        parts.append(f"cut at checkpoint {output.checkpoint}")
    if output.records is not None:
        parts.append(counted(output.records, "record"))
    if hidden := sum(place.hidden or 0 for place in output.places):
        parts.append(f"readers do not see {counted(hidden, 'offset')}")
    return "; ".join(filter(None, parts))


def in_full(output: WaitingOutput, now_ms: int, width: int) -> Iterator[str]:
    """The details of one output, with labels."""
    yield output.name
    for label, content in _labelled(output, now_ms):
        yield from text.labelled(label, content, _LABEL_WIDTH, width)


def _labelled(output: WaitingOutput, now_ms: int) -> Iterator[tuple[str, str]]:
    yield "kind", output.kind
    yield "state", output.state
    yield "decided", _decided(output)
    yield "sink", f"{output.sink}, subtask {output.subtask}"
    if output.incarnation is not None:
        yield "written by", f"incarnation {output.incarnation}, attempt {output.attempt}"
    if output.checkpoint is not None:
        yield "cut at", f"the barrier of checkpoint {output.checkpoint}"
    if output.records is not None:
        yield "records", f"{output.records:,}"
    if output.producer_id is not None:
        yield "producer", f"id {output.producer_id}, epoch {output.epoch}"
    if output.started_at_ms is not None:
        yield "since", f"{text.moment(output.started_at_ms)}, for {shown_duration(output.open_ms(now_ms) or 0)}"
    if (left_ms := output.left_ms(now_ms)) is not None:
        yield "left", f"{shown_duration(left_ms)}, then the broker aborts it"
    for number, place in enumerate(output.places):
        count = "" if place.count is None else f", {counted(place.count, 'record')}"
        offset = "" if place.first_offset is None else f" offset {place.first_offset} and on{count}"
        hidden = "" if place.hidden is None else f"; readers do not see {counted(place.hidden, 'offset')}"
        yield "" if number else "partitions", f"{place.topic}[{place.partition}]{offset}{hidden}"
    if output.where:
        yield "where", output.where
    if output.next:
        yield "next", output.next
