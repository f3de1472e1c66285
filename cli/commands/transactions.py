"""`exactlyonce transactions`: what a pipeline, or a sink of Spark, has open in the cluster; and abort what is nobody's.

Invariants: what a manifest or a repair names is never aborted; nothing is, before the coordinator was fenced and what
is decided was read after that, so that no decision can come in between; nor is anything of an incarnation that
the fence may have missed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from exactlyonce.cli import text
from exactlyonce.cli.arguments import Commands, add_cluster, add_command, add_pipeline_name, client, pipeline_name
from exactlyonce.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from exactlyonce.cli.open_transactions import Open

_EXAMPLES = """\
List the open transactions of a pipeline or of a sink of Spark, and abort those that
nobody has decided on. Until it is ended, an open transaction holds back all readers of
its partitions: after a crash until the pipeline runs again, or the broker's timeout.

examples:
  exactlyonce transactions list order-totals
  exactlyonce transactions abort order-totals
"""
_ABORT = """\
Abort the open transactions of a pipeline or of a sink of Spark whose process has died.
What a checkpoint has decided is left: the next run makes it visible. Nothing is lost,
for what was aborted is computed, or written, again. Refused while the pipeline runs;
with --take-over its coordinator is fenced, and it ends. A sink of Spark has no
heartbeat while its tasks work: if they do, its batch fails and is written again.
"""
_COLUMNS = ("transaction", "state", ">open for", "partitions", "decided")


def add(commands: Commands) -> None:
    """The parser, and those of its actions."""
    usage, summary = "list|abort PIPELINE [options]", "list and abort open transactions"
    parser = add_command(commands, "transactions", usage, summary, _EXAMPLES, show)
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True, prog=parser.prog)
    listing = add_command(actions, "list", "PIPELINE [options]", "show what is open", "", show)
    aborting = add_command(actions, "abort", "PIPELINE [options]", "abort what nobody decided", _ABORT, abort)
    for action in (listing, aborting):
        add_pipeline_name(action, "its name, its sinkId")
        action.add_argument("--json", action="store_true", help="as one JSON document")
    aborting.add_argument("--take-over", action="store_true", help="also from an instance that seems to be running")
    for action in (listing, aborting):
        add_cluster(action)


def show(args: argparse.Namespace) -> int:
    """Print what is open."""
    from exactlyonce.cli.open_transactions import find_open

    config = client(args)
    name = pipeline_name(args)
    _print(args, found := find_open(config, name))
    if not found and not args.json:
        print(f"{name} has no open transactions.")
    return 0


def abort(args: argparse.Namespace) -> int:
    """Abort what is open and not decided, and name it."""
    from exactlyonce.cli.open_transactions import abort_undecided
    from exactlyonce.cli.traces import find
    from exactlyonce.engines.system_clock import SystemClock

    config = client(args)
    traces = find(config, pipeline_name(args))
    sign = traces.sign_of_life(SystemClock().now_ms())
    if sign and not args.take_over:
        raise ConfigError(
            f"{traces.pipeline} may be running: {sign}. Stop it first, or add --take-over, which fences it: it then "
            f"ends without losing anything."
        )
    aborted, left = abort_undecided(config, traces)
    if args.json:
        print(json.dumps({"aborted": [each.as_json() for each in aborted], "left": [each.as_json() for each in left]}))
        return 0
    _print(args, [*aborted, *left])
    print(f"{text.counted(len(aborted), 'transaction')} aborted.")
    if left:
        again = "its query" if traces.is_sink else "it"
        print(f"{text.counted(len(left), 'transaction')} decided, and left: run {again}, which makes them visible.")
    return 0


def _print(args: argparse.Namespace, found: list[Open]) -> None:
    if args.json:
        document: list[dict[str, Any]] = [each.as_json() for each in found]
        print(json.dumps(document))
    elif found:
        print(*_table(found), sep="\n")


def _table(found: list[Open]) -> Iterator[str]:
    from exactlyonce.engines.system_clock import SystemClock

    now_ms = SystemClock().now_ms()
    yield from text.table(_COLUMNS, [each.row(now_ms) for each in found])
