"""`exactlyonce savepoint`: a checkpoint on request, which never expires and stands for itself."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import msgspec

from exactlyonce.cli import text
from exactlyonce.cli.arguments import Commands, add_cluster, add_command, add_pipeline_name, client, pipeline_name
from exactlyonce.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from exactlyonce.checkpoint.records.manifest import Manifest

_EXAMPLES = """\
Take a savepoint of a pipeline that runs, on whatever machine: a checkpoint that never
expires and stands on no other. The run takes it at once, aligned and with all state
written whole, commits its output like any checkpoint's, and goes on; with --stop it
ends cleanly behind it.

examples:
  exactlyonce savepoint order-totals
  exactlyonce savepoint order-totals --stop

Go on from it: `exactlyonce run orders:pipeline --from-savepoint N`.
"""


def add(commands: Commands) -> None:
    """The parser."""
    parser = add_command(commands, "savepoint", "PIPELINE [options]", "take a savepoint", _EXAMPLES, savepoint)
    add_pipeline_name(parser)
    parser.add_argument("--stop", action="store_true", help="end the run cleanly behind it")
    parser.add_argument("--timeout", metavar="T", default="10m", help="how long to wait for it (default: 10m)")
    parser.add_argument("--json", action="store_true", help="the result as one JSON document")
    add_cluster(parser)


def savepoint(args: argparse.Namespace) -> int:
    """Ask, wait, and say what became of it."""
    from exactlyonce.checkpoint.store.log_reader import read_history
    from exactlyonce.cli.asking import savepoint as ask_for_savepoint
    from exactlyonce.engines.system_clock import SystemClock
    from exactlyonce.pipeline.durations import duration_ms

    timeout_ms, config = duration_ms(args.timeout, "--timeout"), client(args)
    pipeline = pipeline_name(args)
    history = read_history(config.confluent(), pipeline)
    if history.living(SystemClock().now_ms()) is None:
        latest = history.latest.checkpoint if history.latest else 0
        raise ConfigError(
            f"{pipeline} does not run, so that nobody takes a savepoint. Nothing is lost without one: the next run "
            f"goes on from checkpoint {latest}. To take one, run it and ask again."
        )
    manifest = ask_for_savepoint(config, pipeline, timeout_ms, stop=args.stop)
    print(_as_json(manifest) if args.json else "\n".join(_as_text(manifest, stopped=args.stop)))
    return 0


def _as_json(manifest: Manifest) -> str:
    document = {
        "pipeline": manifest.pipeline, "checkpoint": manifest.checkpoint, "completed_at_ms": manifest.completed_at_ms,
        "state_bytes": sum(each.state_bytes for each in manifest.operators), "offsets": manifest.offsets,
    }  # fmt: skip
    return msgspec.json.encode(document).decode()


def _as_text(manifest: Manifest, *, stopped: bool) -> list[str]:
    from exactlyonce.engines.local.reporting import size

    state = size(sum(each.state_bytes for each in manifest.operators))
    lines = [
        f"Savepoint {manifest.checkpoint} of {manifest.pipeline}, {text.moment(manifest.completed_at_ms)}: {state} of "
        f"state. It is kept until `exactlyonce savepoints delete {manifest.pipeline} {manifest.checkpoint}`."
    ]
    if stopped:
        lines.append("The run has ended cleanly; the next one goes on from here.")
    return lines
