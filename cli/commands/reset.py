"""`exactlyonce reset`: makes a pipeline begin anew. Nothing is changed before what goes was shown and agreed to."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from exactlyonce.cli import text
from exactlyonce.cli.arguments import Commands, add_cluster, add_command, add_pipeline_name, client, pipeline_name
from exactlyonce.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from exactlyonce.cli.traces import Traces

_DECLINED = 1
_LABEL_WIDTH = 15

_EXAMPLES = """\
Forget what a pipeline, or a sink of Spark, has done: its checkpoints with all state, its
open transactions, its group offsets. The next run begins anew. Input and output topics
are never touched: what was written stays, and a new run writes it again. Nor are stores:
with a ledger there, a new run halts until target and ledger are emptied. Shows what
goes, and asks.

examples:
  exactlyonce reset order-totals
  exactlyonce reset order-totals --yes --bootstrap-servers 127.0.0.1:9092
"""


def add(commands: Commands) -> None:
    """The parser."""
    parser = add_command(commands, "reset", "PIPELINE [options]", "forget what a pipeline has done", _EXAMPLES, reset)
    add_pipeline_name(parser)
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--force", action="store_true", help="also if it may be running")
    add_cluster(parser)


def reset(args: argparse.Namespace) -> int:
    """Show, ask, erase."""
    from exactlyonce.cli.traces import erase, find

    config = client(args)
    traces = find(config, pipeline_name(args))
    _show(traces, config.bootstrap_servers)
    _require_dead(traces, args)
    if not args.yes:
        if not _agreed(traces.pipeline):
            print("Nothing was changed.")
            return _DECLINED
        shown, traces = traces, find(config, traces.pipeline)  # nobody knows for how long it was looked at
        _require_dead(traces, args)
        _require_same(shown, traces)
    kept = erase(config, traces, print)
    if kept:
        print(f"Group {traces.pipeline} is in use by a consumer: its offsets in {', '.join(kept)} were left.")
    print(f"{traces.pipeline} has forgotten everything; its next run begins anew.")
    return 0


def _require_dead(traces: Traces, args: argparse.Namespace) -> None:
    from exactlyonce.engines.system_clock import SystemClock

    sign = traces.sign_of_life(SystemClock().now_ms())
    if sign and not args.force:
        raise ConfigError(f"{traces.pipeline} may be running: {sign}. Stop it first, or add --force if it has ended.")


def _require_same(shown: Traces, now: Traces) -> None:
    """ConfigError where something has happened since it was shown what goes."""
    if _newest(shown) != _newest(now):
        raise ConfigError(f"Nothing was changed: {now.pipeline} has run since it was shown what goes. Look again.")


def _newest(traces: Traces) -> tuple[int, int] | None:
    history = traces.history
    return None if history is None else (history.incarnation_latest, history.checkpoint_latest)


def _show(traces: Traces, bootstrap_servers: str) -> None:
    width = text.terminal_width()
    going, staying = f"Of {traces.pipeline} at {bootstrap_servers}, this goes:", "This stays:"
    for title, parts in ((going, traces.going()), (staying, traces.staying())):
        print(title)
        for label, content in parts:
            print(*text.labelled(label, content, _LABEL_WIDTH, width), sep="\n")


def _agreed(pipeline: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError("Nothing was changed: there is no terminal to ask on. Add --yes to agree beforehand.")
    try:
        return input(f"Reset {pipeline}? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        print()
        return False
