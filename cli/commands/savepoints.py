"""`exactlyonce savepoints`: those that are retained: listed, verified, deleted."""

from __future__ import annotations

import argparse
from collections.abc import Container, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from exactlyonce.cli import text
from exactlyonce.cli.arguments import Commands, add_cluster, add_command, add_pipeline_name, client, pipeline_name
from exactlyonce.pipeline.sizes import counted, shown_bytes

if TYPE_CHECKING:
    from exactlyonce.checkpoint.records.manifest import Manifest

_DAMAGED = 1
_EXAMPLES = """\
List the savepoints of a pipeline, find out whether one can be restored, or delete one.
They are kept with the checkpoints of the pipeline, and never expire.

examples:
  exactlyonce savepoints list order-totals
  exactlyonce savepoints verify order-totals 42
  exactlyonce savepoints verify order-totals /backups/order-totals-42-1f2e3d4c
  exactlyonce savepoints delete order-totals 42
"""
_LIST = "List the savepoints that are retained. A run is not disturbed.\n"
_VERIFY = """\
Read every block of a savepoint, or every file of an exported one, and compare it with its
SHA-256. Exit code 1, with what is damaged, if it could not be restored. A run is not
disturbed.
"""
_DELETE = """\
Delete a savepoint: by the run, if the pipeline runs, else at once. What other checkpoints
stand on stays. The newest checkpoint is never deleted, for the next run goes on from it.
Of an exported one the folder goes, first the file that makes it a savepoint; where the
disk is full, that one last.
"""


def add(commands: Commands) -> None:
    """The parser, and those of its actions."""
    usage, summary = "list|verify|delete PIPELINE [N] [options]", "list, verify and delete savepoints"
    parser = add_command(commands, "savepoints", usage, summary, _EXAMPLES, show)
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True, prog=parser.prog)
    listing = add_command(actions, "list", "PIPELINE [options]", "show what is retained", _LIST, show)
    add_pipeline_name(listing)
    listing.add_argument("--json", action="store_true", help="as one JSON document")
    verifying = add_command(actions, "verify", "PIPELINE N|URL [options]", "read all of one", _VERIFY, verify)
    deleting = add_command(actions, "delete", "PIPELINE N|URL [options]", "delete one", _DELETE, delete)
    for each in (verifying, deleting):
        add_pipeline_name(each)
        each.add_argument("savepoint", metavar="N|URL", help="its number, as it is listed, or where it was exported to")
    deleting.add_argument("--timeout", metavar="T", default="2m", help="how long to wait for the run (default: 2m)")
    for each in actions.choices.values():
        add_cluster(each)


def show(args: argparse.Namespace) -> int:
    """Print the list."""
    from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_history

    config = client(args)
    history = read_history(config, pipeline_name(args))
    found = [*history.savepoints.values()]
    if args.json:
        listed = [_as_json(each, finalized=each.checkpoint in history.finalized) for each in found]
        print(msgspec.json.encode(listed).decode())
    elif not found:
        print(f"{history.pipeline} has no savepoints in its topic.")
    else:
        print(*as_text(found, history.finalized, text.terminal_width()), sep="\n")
    return 0


def _as_json(manifest: Manifest, *, finalized: bool) -> dict[str, Any]:
    return {
        "checkpoint": manifest.checkpoint, "state": "finalized" if finalized else "decided",
        "completed_at_ms": manifest.completed_at_ms, "state_bytes": manifest.state_bytes,
        "parallelism": manifest.parallelism, "max_parallelism": manifest.max_parallelism, "offsets": manifest.offsets,
    }  # fmt: skip


def as_text(found: Sequence[Manifest], finalized: Container[int], width: int) -> Iterator[str]:
    """Savepoints for people, each with Sn of its sources below: lines of at most *width* columns, where a word fits."""
    rows = [
        (
            *(str(each.checkpoint), "finalized" if each.checkpoint in finalized else "decided"),
            *(text.moment(each.completed_at_ms), shown_bytes(each.state_bytes)),
        )
        for each in found
    ]
    header, *lines = text.table((">id", "state", "completed", ">state size"), rows)
    yield header
    indent = " " * header.index("state")
    for each, line in zip(found, lines, strict=True):
        yield line
        labels = text.sn_by_source(each)
        label_width = max(map(len, labels), default=0) + 2
        for label, places in labels.items():
            yield from text.labelled(label, places, label_width, width, indent)


def verify(args: argparse.Namespace) -> int:
    """Read all of it."""
    from exactlyonce.views.checkpoints import verified, verified_export

    if args.savepoint.isdecimal():
        found, noun = verified(client(args), pipeline_name(args), int(args.savepoint)), "block"
        damage = [f"Savepoint {found.checkpoint} cannot be restored: {each}" for each in found.damage]
        title = f"Savepoint {found.checkpoint}"
    else:
        pipeline = pipeline_name(args)
        found, noun = verified_export(_url(args.savepoint)), "file"
        damage, title = [*found.damage], f"Savepoint {found.checkpoint} of {found.pipeline}"
        if not damage and found.pipeline != pipeline:
            print(f"It is one of {found.pipeline}, not of {pipeline}.")
    if damage:
        print(*damage, sep="\n")
        return _DAMAGED
    if not found.finalized:
        print(f"{title} is decided, and not known to be committed: the next run finishes it.")
    print(f"{title} is whole: {counted(found.parts, noun)}, unchanged.")
    return 0


def _url(place: str) -> str:
    """*place*, which is no number, as it is to be looked for; ConfigError unless it is a storage."""
    from exactlyonce.checkpoint.records.storage_url import storage_url
    from exactlyonce.engines.configuration import absolute

    url = absolute(place)
    storage_url(url, "N|URL", or_else="the number of a savepoint, as it is listed")
    return url


def delete(args: argparse.Namespace) -> int:
    """Delete it, and say so."""
    from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_history
    from exactlyonce.engines.savepoints.exported import remove
    from exactlyonce.engines.savepoints.retained import delete as delete_savepoint
    from exactlyonce.pipeline.durations import duration_ms

    if not args.savepoint.isdecimal():
        pipeline, url = pipeline_name(args), _url(args.savepoint)
        print(f"Savepoint {remove(url, pipeline)} of {pipeline} at {url} is deleted.")
        return 0
    timeout_ms, config = duration_ms(args.timeout, "--timeout"), client(args)
    history = read_history(config, pipeline_name(args))
    delete_savepoint(config, history, int(args.savepoint), timeout_ms, text.to_stderr)
    print(f"Savepoint {args.savepoint} of {history.pipeline} is deleted.")
    return 0
