"""`exactlyonce transactions`: what a pipeline, or a sink of Spark, has waiting; commit what is decided, abort the rest.

Invariant: what is refused is refused before anything is fenced.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from exactlyonce.cli import text
from exactlyonce.cli.arguments import Commands, Parser, add_cluster, add_command, add_pipeline_name, client
from exactlyonce.cli.lines import note_for
from exactlyonce.pipeline.durations import shown_duration
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.sizes import counted

if TYPE_CHECKING:
    from exactlyonce.connectors.kafka.client_config import ClientConfig
    from exactlyonce.engines.ending.waiting import WaitingOutput
    from exactlyonce.engines.traces import Traces
    from exactlyonce.pipeline.graph import LogicalGraph

_EXAMPLES = """\
Show what a pipeline or a sink of Spark has waiting: its open transactions, and what is
set aside for stores, each with its age, the time until the broker aborts it, and the
checkpoint that has decided it. Then commit what is decided, or abort what is not. Until
it is ended, an open transaction holds back all readers of its partitions: after a crash
until the pipeline runs again, which does both by itself, or the broker's timeout.

examples:
  exactlyonce transactions list order-totals
  exactlyonce transactions describe order-totals eo:order-totals:out:0:1.1:1
  exactlyonce transactions commit order-totals
  exactlyonce transactions abort order-totals
"""
_LIST = """\
List what waits. Stores are asked where the pipeline is named as module:pipeline, which
says where they are. Nothing is changed, and a pipeline runs on.
"""
_DESCRIBE = """\
Show all that is known of what waits: the offsets and records by partition, who wrote
it, which checkpoint has decided it, and what becomes of it. Nothing is changed.
"""
_COMMIT = """\
Finish the checkpoint that is decided, as the next run would: commit all of it, repair
what the broker has aborted meanwhile, and note that it is final. It is one decision,
so that its transactions, and what it has for stores, are committed together; with
TRANSACTION it is refused unless that is decided. Refused while the pipeline runs, which
does it by itself; with --take-over its coordinator is fenced, and it ends.
"""
_ABORT = """\
Abort the open transactions of a pipeline or of a sink of Spark whose process has died,
and what is prepared in its stores, where it is named as module:pipeline; or of these
TRANSACTION alone. What a checkpoint has decided is left: the next run makes it visible.
Nothing is lost, for what was aborted is computed, or written, again. Refused while the
pipeline runs; with --take-over its coordinator is fenced, and it ends. A sink of Spark
has no heartbeat while its tasks work: if they do, its batch fails and is written again.
"""
_COLUMNS = ("transaction", "state", ">open for", ">left", "decided")
_LABEL_WIDTH = 14
_INDENT = "    "


def add(commands: Commands) -> None:
    """The parser, and those of its actions."""
    usage, summary = "list|describe|commit|abort PIPELINE [options]", "list, show, commit and abort what waits"
    parser = add_command(commands, "transactions", usage, summary, _EXAMPLES, show)
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True, prog=parser.prog)
    listing = add_command(actions, "list", "PIPELINE [options]", "show what waits", _LIST, show)
    _add_arguments(listing, names="")
    usage = "PIPELINE TRANSACTION ... [options]"
    describing = add_command(actions, "describe", usage, "show all of one", _DESCRIBE, describe)
    _add_arguments(describing, names="+")
    usage = "PIPELINE [TRANSACTION ...] [options]"
    for name, summary, about, command in (
        ("commit", "commit what is decided", _COMMIT, commit),
        ("abort", "abort what nobody decided", _ABORT, abort),
    ):
        ending = add_command(actions, name, usage, summary, about, command)
        _add_arguments(ending, names="*")
        ending.add_argument("--take-over", action="store_true", help="also from an instance that seems to be running")
    for each in actions.choices.values():
        add_cluster(each)


def _add_arguments(parser: Parser, names: str) -> None:
    add_pipeline_name(parser)
    if names:
        parser.add_argument("transactions", metavar="TRANSACTION", nargs=names, help="its name, as it is listed")
    parser.add_argument("--json", action="store_true", help="as one JSON document")


def show(args: argparse.Namespace) -> int:
    """Print what waits."""
    from exactlyonce.views.transactions import waiting_output

    config, traces, graph = _meant(args)
    waiting, unasked = waiting_output(config, traces, graph)
    _print(args, waiting, unasked)
    if not waiting and not args.json:
        print(f"{traces.pipeline} has no open transactions.")
    return 0


def describe(args: argparse.Namespace) -> int:
    """Print all of what was named."""
    from exactlyonce.connectors.kafka.transactions import Transactions
    from exactlyonce.engines.ending.waiting import TRANSACTION, with_offsets
    from exactlyonce.views.transactions import waiting_output

    config, traces, graph = _meant(args)
    waiting, unasked = waiting_output(config, traces, graph)
    by_name = {each.name: each for each in waiting}
    if missing := [name for name in args.transactions if name not in by_name]:
        unknown = "".join(f" The store of sink {sink} was not asked: {why}." for sink, why in unasked.items())
        raise ConfigError(
            f"{', '.join(missing)} is none of what {traces.pipeline} has waiting: it was ended, or never was. "
            f"`exactlyonce transactions list {traces.pipeline}` shows what waits.{unknown}"
        )
    chosen = [by_name[name] for name in args.transactions]
    with closing(Transactions(config)) as transactions:
        chosen = [with_offsets(transactions, each) if each.kind == TRANSACTION else each for each in chosen]
    if args.json:
        print(json.dumps([{**as_json(each, _now_ms()), "next": each.next} for each in chosen]))
        return 0
    for number, each in enumerate(chosen):
        print(*([""] if number else []), *in_full(each, _now_ms(), text.terminal_width()), sep="\n")
    return 0


def commit(args: argparse.Namespace) -> int:
    """Commit what is decided, and name it."""
    from exactlyonce.engines.ending.committing import finish, require_decided, unfinished
    from exactlyonce.views.transactions import waiting_output

    config, traces, graph = _meant(args)
    require_decided(waiting_output(config, traces, graph).waiting, args.transactions)
    checkpoint, fates = None, dict[str, str]()
    if unfinished(traces, graph) is not None:
        _require_dead(args, traces)
        checkpoint, fates = finish(config, traces, graph, note_for(args), take_over=args.take_over)
    if args.json:
        print(json.dumps({"checkpoint": checkpoint, "fates": fates}))
    elif checkpoint is None:
        print(f"{traces.pipeline} has nothing that is decided and waits: its last checkpoint is finalized.")
    else:
        if fates:
            print(*text.table(("transaction", "fate"), sorted(fates.items())), sep="\n")
        print(f"Checkpoint {checkpoint} is finalized: {counted(len(fates), 'transaction')} committed.")
    return 0


def abort(args: argparse.Namespace) -> int:
    """Abort what waits and is not decided, and name it."""
    from exactlyonce.engines.ending.aborting import abort_undecided, require_undecided
    from exactlyonce.views.transactions import waiting_output

    config, traces, graph = _meant(args)
    if args.transactions:
        require_undecided(waiting_output(config, traces, graph).waiting, args.transactions)
    _require_dead(args, traces)
    aborted, left, unasked = abort_undecided(config, traces, args.transactions, graph)
    now_ms = _now_ms()
    if args.json:
        document = {"aborted": aborted, "left": left}
        shown = {key: [as_json(each, now_ms) for each in some] for key, some in document.items()}
        print(json.dumps({**shown, "unasked": unasked}))
        return 0
    _print(args, [*aborted, *left], unasked)
    names = f": {', '.join(each.name for each in aborted)}" if left else ""
    print(f"{counted(len(aborted), 'transaction')} aborted{names or '.'}")
    decided = sum(each.is_decided for each in left)
    if decided:
        again = "its query" if traces.is_sink else "it"
        print(f"{counted(decided, 'transaction')} decided, and left: run {again}, which makes them visible.")
    if len(left) > decided:
        print(f"{counted(len(left) - decided, 'transaction')} left that was not named.")
    return 0


def _meant(args: argparse.Namespace) -> tuple[ClientConfig, Traces, LogicalGraph | None]:
    """The cluster, the pipeline's traces there, and its graph where its module was named."""
    from exactlyonce.cli.arguments import name_and_graph
    from exactlyonce.engines.traces import find

    config = client(args)
    name, graph = name_and_graph(args)
    return config, find(config, name), graph


def _require_dead(args: argparse.Namespace, traces: Traces) -> None:
    sign = traces.sign_of_life(_now_ms())
    if sign and not args.take_over:
        raise ConfigError(
            f"{traces.pipeline} may be running: {sign}. Stop it first, or add --take-over, which fences it: it then "
            f"ends without losing anything."
        )


def _print(args: argparse.Namespace, waiting: Sequence[WaitingOutput], unasked: Mapping[str, str]) -> None:
    now_ms = _now_ms()
    if args.json:
        document: list[dict[str, Any]] = [as_json(each, now_ms) for each in waiting]
        document += [{"kind": "not known", "sink": sink, "why": why} for sink, why in unasked.items()]
        print(json.dumps(document))
        return
    if waiting:
        print(*as_table(waiting, now_ms, text.terminal_width()), sep="\n")
    for sink, why in unasked.items():
        print(text.wrapped(f"not known: what waits in the store of sink {sink}: {why}", text.terminal_width()))


def _now_ms() -> int:
    from exactlyonce.engines.system_clock import SystemClock

    return SystemClock().now_ms()


def as_json(output: WaitingOutput, now_ms: int) -> dict[str, Any]:
    """Output that waits, for machines."""
    from exactlyonce.engines.ending.waiting import TRANSACTION

    return {
        "name": output.name, "kind": output.kind, "state": output.state, "sink": output.sink, "subtask": output.subtask,
        "transactional_id": output.name if output.kind == TRANSACTION else None,
        "producer_id": output.producer_id, "epoch": output.epoch,
        "incarnation": output.incarnation, "attempt": output.attempt,
        "started_at_ms": output.started_at_ms, "timeout_ms": output.timeout_ms,
        "open_ms": output.open_ms(now_ms), "left_ms": output.left_ms(now_ms),
        "partitions": [[place.topic, place.partition] for place in output.places],
        "written": [vars(place) for place in output.places],
        "checkpoint": output.checkpoint, "records": output.records, "decided_in": output.decided_in,
        "where": output.where or None,
    }  # fmt: skip


def as_table(waiting: Sequence[WaitingOutput], now_ms: int, width: int) -> Iterator[str]:
    """A row for each output that waits, and below it where it is."""
    header, *rows = text.table(_COLUMNS, [_row(output, now_ms) for output in waiting])
    yield header
    for output, row in zip(waiting, rows, strict=True):
        yield row
        if summary := _summary(output):
            yield from text.labelled("", summary, 0, width, _INDENT)


def _row(output: WaitingOutput, now_ms: int) -> text.Row:
    times = (output.open_ms(now_ms), output.left_ms(now_ms))
    shown = ("" if time_ms is None else shown_duration(time_ms) for time_ms in times)
    return (output.name, output.state, *shown, _decided(output))


def _decided(output: WaitingOutput) -> str:
    return "no" if output.decided_in is None else f"in checkpoint {output.decided_in}"


def _summary(output: WaitingOutput) -> str:
    from exactlyonce.engines.ending.waiting import TRANSACTION

    parts = [] if output.kind == TRANSACTION else [f"sink {output.sink}, subtask {output.subtask}"]
    topics: dict[str, list[str]] = {}
    for place in output.places:
        topics.setdefault(place.topic, []).append(str(place.partition))
    parts.append(" ".join(f"{topic}[{','.join(some)}]" for topic, some in sorted(topics.items())) or output.where)
    if output.producer_id is not None:
        parts.append(f"producer {output.producer_id} epoch {output.epoch}")
    if output.checkpoint is not None:
        parts.append(f"cut at checkpoint {output.checkpoint}")
    if output.records is not None:
        parts.append(counted(output.records, "record"))
    return "; ".join(filter(None, parts))


def in_full(output: WaitingOutput, now_ms: int, width: int) -> Iterator[str]:
    """All that is known of what waits, with labels."""
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
        yield "" if number else "partitions", f"{place.topic}[{place.partition}]{offset}"
    if output.where:
        yield "where", output.where
    if output.next:
        yield "next", output.next
