"""`exactlyonce cancel`: ends a run without a last checkpoint, on whatever machine it is."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import msgspec

from exactlyonce.cli.arguments import Commands, add_cluster, add_command, add_pipeline_name, client, pipeline_name
from exactlyonce.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from exactlyonce.checkpoint.records.history import History

_EXAMPLES = """\
End the run of a pipeline, on whatever machine, without a last checkpoint. A checkpoint
that is being decided is committed to its end; what was done since is forgotten: its open
transactions are aborted, and nothing of it becomes visible. The next run goes on from the
newest checkpoint, and reads again what was read since.

examples:
  exactlyonce cancel order-totals
  exactlyonce cancel order-totals --timeout 1m --json

To end with a last checkpoint, send the run SIGTERM, or `exactlyonce savepoint --stop`.
"""


def add(commands: Commands) -> None:
    """The parser."""
    parser = add_command(commands, "cancel", "PIPELINE [options]", "end a run without a checkpoint", _EXAMPLES, cancel)
    add_pipeline_name(parser)
    parser.add_argument("--timeout", metavar="T", default="10m", help="how long to wait for it (default: 10m)")
    parser.add_argument("--json", action="store_true", help="the result as one JSON document")
    add_cluster(parser)


def cancel(args: argparse.Namespace) -> int:
    """Ask, wait, and say what is left."""
    from exactlyonce.checkpoint.store.log_reader import read_history
    from exactlyonce.cli import asking
    from exactlyonce.engines.spark.sink.position import KIND
    from exactlyonce.engines.system_clock import SystemClock
    from exactlyonce.pipeline.durations import duration_ms

    timeout_ms, config = duration_ms(args.timeout, "--timeout"), client(args)
    pipeline = pipeline_name(args)
    history = read_history(config.confluent(), pipeline)
    if history.latest is not None and history.latest.kind == KIND:
        raise ConfigError(f"{pipeline} is a sink of Spark: stop its query instead.")
    if history.living(SystemClock().now_ms()) is None:
        raise ConfigError(f"{pipeline} does not run, so that there is nothing to cancel. Nothing was changed.")
    found = asking.cancel(config, pipeline, timeout_ms)
    print(_as_json(found) if args.json else _as_text(found))
    return 0


def _retained(history: History) -> list[int]:
    return [each.checkpoint for each in history.retained]


def _as_json(history: History) -> str:
    return msgspec.json.encode({"pipeline": history.pipeline, "checkpoints": _retained(history)}).decode()


def _as_text(history: History) -> str:
    checkpoints = ", ".join(map(str, _retained(history))) or "none"
    return (
        f"{history.pipeline} is cancelled: nothing is open, and what was not decided is forgotten. Its checkpoints are "
        f"kept ({checkpoints}), and the next run goes on from the newest."
    )
