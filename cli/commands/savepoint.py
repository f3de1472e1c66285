"""`exactlyonce savepoint`: takes a self-contained checkpoint on request, which never expires."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from exactlyonce.cli import text
from exactlyonce.cli.arguments import Parser, add_cluster, add_pipeline_name, client, pipeline_name, set_command
from exactlyonce.cli.text import note_for
from exactlyonce.pipeline.sizes import shown_bytes

if TYPE_CHECKING:
    from exactlyonce.engines.savepoints.taking import TakenSavepoint

_EXAMPLES = """\
Take a savepoint of a running pipeline, on whatever machine: a self-contained checkpoint
that never expires. The run takes it at once, aligned and with all its state, commits its
output like that of any checkpoint, and goes on; with --stop it ends cleanly after it.

With --to, export it once it is finalized: into a new folder of Avro container files,
without transactions, which any cluster can restore. The topic then drops it with the next
checkpoint. If the pipeline does not run, its newest checkpoint is exported.

examples:
  exactlyonce savepoint order-totals
  exactlyonce savepoint order-totals --stop
  exactlyonce savepoint order-totals --to s3://backups/savepoints

To start from it: `exactlyonce run orders:pipeline --from-savepoint N`, or the printed URL.
"""


def add(parser: Parser) -> None:
    set_command(parser, "PIPELINE [options]", _EXAMPLES, savepoint)
    add_pipeline_name(parser)
    help_text = "export it below URL: /folder, hdfs://host:port/folder or s3://bucket/prefix"
    parser.add_argument("--to", metavar="URL", help=help_text)
    parser.add_argument("--stop", action="store_true", help="end the run cleanly after it")
    parser.add_argument("--timeout", metavar="T", default="10m", help="how long to wait for the run (default: 10m)")
    parser.add_argument("--json", action="store_true", help="the result as one JSON document")
    add_cluster(parser)


def savepoint(args: argparse.Namespace) -> int:
    """Ask the run, wait, export, and say where the savepoint is."""
    from exactlyonce.engines.savepoints.taking import take
    from exactlyonce.pipeline.durations import duration_ms

    timeout_ms, config = duration_ms(args.timeout, "--timeout"), client(args)
    taken = take(
        config, pipeline_name(args), to=args.to, stop=args.stop, timeout_ms=timeout_ms, note=note_for(args),
        shown=lambda taken: print(_as_json(taken) if args.json else "\n".join(_as_text(taken)), flush=True),
    )  # fmt: skip
    if not args.json:
        for line in _what_stays(taken):
            print(line)
    return 0


def _as_json(taken: TakenSavepoint) -> str:
    manifest = taken.manifest
    document = {
        "pipeline": manifest.pipeline, "checkpoint": manifest.checkpoint, "completed_at_ms": manifest.completed_at_ms,
        "state_bytes": manifest.state_bytes, "offsets": manifest.offsets,
        "url": taken.url or None,
    }  # fmt: skip
    return msgspec.json.encode(document).decode()


def _as_text(taken: TakenSavepoint) -> Iterator[str]:
    manifest = taken.manifest
    what = "Savepoint" if taken.by_run else "The pipeline does not run: its newest checkpoint"
    yield (
        f"{what} {manifest.checkpoint} of {manifest.pipeline}, {text.moment(manifest.completed_at_ms)}: "
        f"{shown_bytes(manifest.state_bytes)} of state."
    )
    if taken.url:
        yield f"Exported to {taken.url}"


def _what_stays(taken: TakenSavepoint) -> Iterator[str]:
    if taken.is_kept and taken.url and taken.is_shared and not taken.stopped:
        yield "Another request came at the same time, and got the same savepoint."
    if taken.is_kept:
        yield f"It {taken.kept_until}"
    if taken.stopped:
        yield "The run has ended cleanly."
