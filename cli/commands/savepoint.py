"""`exactlyonce savepoint`: takes a self-contained checkpoint on request, which never expires."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec

from exactlyonce.cli import text
from exactlyonce.cli.arguments import Parser, add_cluster, add_pipeline_name, client, pipeline_name, set_command
from exactlyonce.cli.text import note_for
from exactlyonce.pipeline.errors import ConfigError, ExactlyOnceError
from exactlyonce.pipeline.sizes import shown_bytes

if TYPE_CHECKING:
    from exactlyonce.checkpoint.records.history import History
    from exactlyonce.checkpoint.records.manifest import Manifest
    from exactlyonce.connectors.kafka.client_config import ClientConfig

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
    from exactlyonce.checkpoint.records.storage_url import storage_url
    from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_history
    from exactlyonce.engines import run_requests
    from exactlyonce.engines.configuration import absolute
    from exactlyonce.engines.savepoints.exported import require_place
    from exactlyonce.pipeline.durations import duration_ms

    timeout_ms, config = duration_ms(args.timeout, "--timeout"), client(args)
    pipeline = pipeline_name(args)
    if args.to is not None:
        args.to = absolute(args.to)
        require_place(storage_url(args.to, "--to"))
    history = read_history(config, pipeline)
    living = run_requests.living_run(history)
    runs = living is not None
    if living is not None:
        manifest = run_requests.savepoint(config, pipeline, living, timeout_ms, stop=args.stop, note=note_for(args))
    else:
        manifest = _newest(history, args)
    url = _shown(config, manifest, args, taken=runs)
    shared = len(manifest.requests) > 1
    if url and runs and not args.stop and not shared:
        _let_go(config, manifest, url, timeout_ms, note_for(args))
    if not args.json:
        kept = runs and (args.stop or not url or shared)
        for line in _what_stays(manifest, kept=kept, shared=bool(url) and shared, stopped=args.stop):
            print(line)
    return 0


def _newest(history: History, args: argparse.Namespace) -> Manifest:
    """The checkpoint to export if the pipeline does not run."""
    from exactlyonce.engines.savepoints.retained import require_finalized

    latest = history.latest.checkpoint if history.latest else 0
    if not args.to or args.stop or history.latest is None:
        raise ConfigError(
            f"{history.pipeline} does not run, so it cannot take a savepoint. Nothing is lost without one: the next "
            f"run goes on from checkpoint {latest}. To take one, run the pipeline and ask again; or export that "
            f"checkpoint: --to URL, without --stop."
        )
    require_finalized(history)
    return history.latest


def _shown(config: ClientConfig, manifest: Manifest, args: argparse.Namespace, *, taken: bool) -> str:
    """Show the savepoint; with --to, export it first, and return the URL of the new folder."""
    from exactlyonce.engines.savepoints.exported import export
    from exactlyonce.engines.savepoints.retained import open_savepoint, unless_expired

    url = ""
    try:
        if args.to:
            with unless_expired(config, manifest), open_savepoint(config, manifest) as contents:
                url = export(contents, args.to)
                _show(manifest, url, taken=taken, json=args.json)
        else:
            _show(manifest, url, taken=taken, json=args.json)
    except (ExactlyOnceError, KeyboardInterrupt):
        if taken and args.to and not url:
            note_for(args)(
                f"Savepoint {manifest.checkpoint} was taken, but could not be exported. It {_kept(manifest)}"
            )
        raise
    return url


def _let_go(config: ClientConfig, manifest: Manifest, url: str, timeout_ms: int, note: Callable[[str], None]) -> None:
    """Have the run delete the exported savepoint in the topic."""
    from exactlyonce.engines import run_requests

    try:
        run_requests.delete(config, manifest.pipeline, manifest.checkpoint, timeout_ms, note)
    except (ExactlyOnceError, KeyboardInterrupt):
        note(
            f"Savepoint {manifest.checkpoint} was exported to {url}, which is complete. If the run has got the "
            f"request, the topic drops it with the next checkpoint; else it {_kept(manifest)}"
        )
        raise


def _show(manifest: Manifest, url: str, *, taken: bool, json: bool) -> None:
    print(_as_json(manifest, url) if json else "\n".join(_as_text(manifest, url, taken=taken)), flush=True)


def _as_json(manifest: Manifest, url: str) -> str:
    document = {
        "pipeline": manifest.pipeline, "checkpoint": manifest.checkpoint, "completed_at_ms": manifest.completed_at_ms,
        "state_bytes": manifest.state_bytes, "offsets": manifest.offsets,
        "url": url or None,
    }  # fmt: skip
    return msgspec.json.encode(document).decode()


def _kept(manifest: Manifest) -> str:
    return f"is kept until `exactlyonce savepoints delete {manifest.pipeline} {manifest.checkpoint}`."


def _as_text(manifest: Manifest, url: str, *, taken: bool) -> Iterator[str]:
    state = shown_bytes(manifest.state_bytes)
    what = "Savepoint" if taken else "The pipeline does not run: its newest checkpoint"
    yield (
        f"{what} {manifest.checkpoint} of {manifest.pipeline}, {text.moment(manifest.completed_at_ms)}: {state} of "
        f"state."
    )
    if url:
        yield f"Exported to {url}"


def _what_stays(manifest: Manifest, *, kept: bool, shared: bool, stopped: bool) -> Iterator[str]:
    if kept and shared and not stopped:
        yield "Another request came at the same time, and got the same savepoint."
    if kept:
        yield f"It {_kept(manifest)}"
    if stopped:
        yield "The run has ended cleanly."
