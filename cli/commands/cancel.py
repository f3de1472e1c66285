"""`exactlyonce cancel`: ends a run without a last checkpoint, whatever machine it runs on.

Invariant: only a run condemns its checkpoints, once all decided output is committed and visible; this deletes them.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import msgspec

from exactlyonce.cli.arguments import Parser, add_cluster, add_pipeline_name, client, pipeline_name, set_command
from exactlyonce.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from exactlyonce.checkpoint.records.history import History
    from exactlyonce.checkpoint.records.manifest import Incarnation

_EXAMPLES = """\
End the run of a pipeline, on whatever machine, without a last checkpoint. A checkpoint
that is being decided is finished. Later work is dropped: its open transactions are
aborted, and none of its output becomes visible. The next run goes on from the newest
checkpoint, and reads the input after it again.

With retention = "delete_on_cancellation" the checkpoints of the run are then deleted, as
by `exactlyonce reset`, and the next run starts from scratch. Savepoints are never deleted:
while the topic has one, all checkpoints are kept.

examples:
  exactlyonce cancel order-totals
  exactlyonce cancel order-totals --timeout 1m --json

To end with a last checkpoint, send the run SIGTERM, or `exactlyonce savepoint --stop`.
"""


def add(parser: Parser) -> None:
    set_command(parser, "PIPELINE [options]", _EXAMPLES, cancel)
    add_pipeline_name(parser)
    parser.add_argument("--timeout", metavar="T", default="10m", help="how long to wait for the run (default: 10m)")
    parser.add_argument("--json", action="store_true", help="the result as one JSON document")
    add_cluster(parser)


def cancel(args: argparse.Namespace) -> int:
    """Ask the run to end, wait, delete its condemned checkpoints, and say what is left."""
    from exactlyonce.cli.text import note_for
    from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_topic
    from exactlyonce.engines import run_requests
    from exactlyonce.engines.pipeline_resources import erase_condemned
    from exactlyonce.pipeline.durations import duration_ms

    timeout_ms, config, note = duration_ms(args.timeout, "--timeout"), client(args), note_for(args)
    topic, seen = read_topic(config, pipeline_name(args))
    history = seen
    if not history.condemned:  # else an earlier deletion was interrupted
        history = run_requests.cancel(config, topic, history, _required_run(history), timeout_ms, note)
    if history.condemned:
        try:
            erase_condemned(config, topic, history, note)
        except KeyboardInterrupt:
            note(
                f"{seen.pipeline} is cancelled, but its checkpoints are not all deleted: the next run deletes the "
                f"rest, and starts from scratch."
            )
            raise
    print(_as_json(history) if args.json else _as_text(history, seen))
    return 0


def _required_run(history: History) -> Incarnation:
    """The run to end; ConfigError if none runs."""
    from exactlyonce.engines.run_requests import living_run

    if history.latest is not None and history.latest.is_spark_sink:
        raise ConfigError(f"{history.pipeline} is a Spark sink: stop its query instead.")
    living = living_run(history)
    if living is None:
        raise ConfigError(f"{history.pipeline} does not run: there is nothing to cancel. Nothing was changed.")
    return living


def _deleted(history: History) -> bool:
    """Whether the checkpoints of the cancelled run are gone, deleted by this command or before."""
    return history.condemned or history.latest is None


def _retained(history: History) -> list[int]:
    return [] if _deleted(history) else [manifest.checkpoint for manifest in history.retained]


def _as_json(history: History) -> str:
    document = {"pipeline": history.pipeline, "checkpoints": _retained(history), "deleted": _deleted(history)}
    return msgspec.json.encode(document).decode()


def _as_text(history: History, seen: History) -> str:
    """*seen* is the history before the cancellation: it names the stores that keep their rows."""
    from exactlyonce.engines.pipeline_resources import stores_of

    ended = f"{history.pipeline} is cancelled: no transaction is open, and undecided work is dropped."
    if _deleted(history):
        deleted = (
            "Its checkpoints are deleted, as configured. The next run starts from scratch, and writes all output again"
        )
        if stores := sorted({*stores_of(seen), *stores_of(history)}):
            kept = f"the rows and the ledger of {', '.join(stores)} stay: it halts until both are emptied"
            return f"{ended} {deleted}; but {kept}."
        return f"{ended} {deleted}, beside the existing output."
    savepoints = ", ".join(map(str, history.savepoints))
    noted = f", with savepoints {savepoints}" if savepoints else ""
    checkpoints = ", ".join(map(str, _retained(history)))
    return f"{ended} Its checkpoints are kept ({checkpoints}){noted}; the next run goes on from the newest."
