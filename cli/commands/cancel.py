"""`exactlyonce cancel`: ends a run without a last checkpoint, on whatever machine it is.

Invariant: what is deleted was condemned by the run itself, once all that it had decided was committed and visible.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import msgspec

from exactlyonce.cli.arguments import Commands, add_cluster, add_command, add_pipeline_name, client, pipeline_name
from exactlyonce.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from exactlyonce.checkpoint.records.history import History
    from exactlyonce.checkpoint.records.manifest import Incarnation

_EXAMPLES = """\
End the run of a pipeline, on whatever machine, without a last checkpoint. A checkpoint
that is being decided is committed to its end; what was done since is forgotten: its open
transactions are aborted, and nothing of it becomes visible. The next run goes on from the
newest checkpoint, and reads again what was read since.

Where the run has retention = "delete_on_cancellation" its checkpoints are deleted then,
as `exactlyonce reset` does it, and the next run begins anew. Savepoints are never deleted:
if one is kept in the topic, all checkpoints are.

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
    """Ask, wait, delete what is condemned, and say what is left."""
    from exactlyonce.cli.lines import note_for
    from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_topic
    from exactlyonce.engines import asking
    from exactlyonce.engines.traces import erase_condemned
    from exactlyonce.pipeline.durations import duration_ms

    timeout_ms, config, note = duration_ms(args.timeout, "--timeout"), client(args), note_for(args)
    topic, seen = read_topic(config, pipeline_name(args))
    history = seen
    if not history.condemned:  # else somebody has begun to delete it, and died
        history = asking.cancel(config, topic, history, _required_run(history), timeout_ms, note)
    if history.condemned:
        try:
            erase_condemned(config, topic, history, note)
        except KeyboardInterrupt:
            note(
                f"{seen.pipeline} is cancelled, and what it was set to delete is not all deleted: the next run deletes "
                f"the rest, and begins anew."
            )
            raise
    print(_as_json(history) if args.json else _as_text(history, seen))
    return 0


def _required_run(history: History) -> Incarnation:
    """The one that is to end; ConfigError where there is nobody to ask."""
    from exactlyonce.engines.asking import living_run

    if history.latest is not None and history.latest.is_spark_sink:
        raise ConfigError(f"{history.pipeline} is a sink of Spark: stop its query instead.")
    living = living_run(history)
    if living is None:
        raise ConfigError(f"{history.pipeline} does not run: there is nothing to cancel. Nothing was changed.")
    return living


def _deleted(history: History) -> bool:
    """Whether the checkpoints of the run that was cancelled are gone: by this command, or by somebody else before, for
    a run has one at least."""
    return history.condemned or history.latest is None


def _retained(history: History) -> list[int]:
    return [] if _deleted(history) else [each.checkpoint for each in history.retained]


def _as_json(history: History) -> str:
    document = {"pipeline": history.pipeline, "checkpoints": _retained(history), "deleted": _deleted(history)}
    return msgspec.json.encode(document).decode()


def _as_text(history: History, seen: History) -> str:
    """*seen* is what there was before it was asked for: of what is deleted it tells what stays."""
    from exactlyonce.engines.traces import stores_of

    ended = f"{history.pipeline} is cancelled: nothing is open, and what was not decided is forgotten."
    if _deleted(history):
        deleted = "Its checkpoints are deleted, as it was set to. The next run begins anew, and writes all output again"
        if stores := sorted({*stores_of(seen), *stores_of(history)}):
            anew = f"what {', '.join(stores)} wrote stays, and its ledger: it halts until both are emptied"
            return f"{ended} {deleted}; but {anew}."
        return f"{ended} {deleted}, beside what is there."
    savepoints = ", ".join(map(str, history.savepoints))
    noted = f", with the savepoints {savepoints}" if savepoints else ""
    checkpoints = ", ".join(map(str, _retained(history)))
    return f"{ended} Its checkpoints are kept ({checkpoints}){noted}; the next run goes on from the newest."
