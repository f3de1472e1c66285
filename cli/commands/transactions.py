"""`exactlyonce transactions`: what a pipeline, or a sink of Spark, has waiting; commit what is decided, abort the rest.

Invariant: what is refused is refused before anything is fenced.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from exactlyonce.cli import text
from exactlyonce.cli.arguments import Commands, Parser, add_cluster, add_command, add_pipeline_name, client
from exactlyonce.cli.lines import note_for
from exactlyonce.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from exactlyonce.cli.traces import Traces
    from exactlyonce.cli.transactions.waiting import WaitingOutput
    from exactlyonce.connectors.kafka.client_config import ClientConfig
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
    config, traces, graph = _meant(args)
    waiting, unasked = _survey(config, traces, graph)
    _print(args, waiting, unasked)
    if not waiting and not args.json:
        print(f"{traces.pipeline} has no open transactions.")
    return 0


def describe(args: argparse.Namespace) -> int:
    """Print all of what was named."""
    from exactlyonce.cli.transactions.open_transactions import with_offsets
    from exactlyonce.cli.transactions.waiting import TRANSACTION
    from exactlyonce.connectors.kafka.transactions import Transactions

    config, traces, graph = _meant(args)
    waiting, unasked = _survey(config, traces, graph)
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
        print(json.dumps([{**each.as_json(_now_ms()), "next": each.next} for each in chosen]))
        return 0
    for number, each in enumerate(chosen):
        print(*([""] if number else []), *each.in_full(_now_ms(), text.terminal_width()), sep="\n")
    return 0


def commit(args: argparse.Namespace) -> int:
    """Commit what is decided, and name it."""
    from exactlyonce.cli.transactions.committing import finish, require_decided, unfinished

    config, traces, graph = _meant(args)
    waiting, _ = _survey(config, traces, graph)
    require_decided(waiting, args.transactions)
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
        print(f"Checkpoint {checkpoint} is finalized: {text.counted(len(fates), 'transaction')} committed.")
    return 0


def abort(args: argparse.Namespace) -> int:
    """Abort what waits and is not decided, and name it."""
    from exactlyonce.cli.transactions.aborting import abort_undecided, require_undecided

    config, traces, graph = _meant(args)
    if args.transactions:
        require_undecided(_survey(config, traces, graph)[0], args.transactions)
    _require_dead(args, traces)
    aborted, left, unasked = abort_undecided(config, traces, args.transactions, graph)
    now_ms = _now_ms()
    if args.json:
        document = {"aborted": aborted, "left": left}
        shown = {key: [each.as_json(now_ms) for each in some] for key, some in document.items()}
        print(json.dumps({**shown, "unasked": unasked}))
        return 0
    _print(args, [*aborted, *left], unasked)
    names = f": {', '.join(each.name for each in aborted)}" if left else ""
    print(f"{text.counted(len(aborted), 'transaction')} aborted{names or '.'}")
    decided = sum(each.is_decided for each in left)
    if decided:
        again = "its query" if traces.is_sink else "it"
        print(f"{text.counted(decided, 'transaction')} decided, and left: run {again}, which makes them visible.")
    if len(left) > decided:
        print(f"{text.counted(len(left) - decided, 'transaction')} left that was not named.")
    return 0


def _meant(args: argparse.Namespace) -> tuple[ClientConfig, Traces, LogicalGraph | None]:
    """The cluster, the pipeline's traces there, and its graph where its module was named."""
    from exactlyonce.cli.arguments import name_and_graph
    from exactlyonce.cli.traces import find

    config = client(args)
    name, graph = name_and_graph(args)
    return config, find(config, name), graph


def _survey(
    config: ClientConfig, traces: Traces, graph: LogicalGraph | None
) -> tuple[list[WaitingOutput], dict[str, str]]:
    """All that waits; and by sink, why its store was not asked, or may not have shown all."""
    from exactlyonce.cli.transactions.open_transactions import find_transactions, open_ids
    from exactlyonce.cli.transactions.staged_output import find_staged
    from exactlyonce.connectors.kafka.transactions import Transactions

    with closing(Transactions(config)) as transactions:
        found = find_transactions(transactions, open_ids(transactions, traces.pipeline), traces.history)
    staged = find_staged(config, traces, graph)
    refusing = {sink: view.problem for sink, view in staged.views.items() if view.problem}
    return [*found, *staged.waiting], {**staged.unasked, **refusing}


def _require_dead(args: argparse.Namespace, traces: Traces) -> None:
    sign = traces.sign_of_life(_now_ms())
    if sign and not args.take_over:
        raise ConfigError(
            f"{traces.pipeline} may be running: {sign}. Stop it first, or add --take-over, which fences it: it then "
            f"ends without losing anything."
        )


def _print(args: argparse.Namespace, waiting: Sequence[WaitingOutput], unasked: Mapping[str, str]) -> None:
    from exactlyonce.cli.transactions.waiting import as_table

    now_ms = _now_ms()
    if args.json:
        document: list[dict[str, Any]] = [each.as_json(now_ms) for each in waiting]
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
