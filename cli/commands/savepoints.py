"""`exactlyonce savepoints`: lists, verifies and deletes savepoints."""

from __future__ import annotations

import argparse
from collections.abc import Container, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from exactlyonce.cli import text
from exactlyonce.cli.arguments import (
    Parser,
    add_action,
    add_cluster,
    add_pipeline_name,
    client,
    pipeline_name,
    set_command,
)
from exactlyonce.pipeline.sizes import counted, shown_bytes

if TYPE_CHECKING:
    from exactlyonce.checkpoint.records.manifest import Manifest

_DAMAGED = 1
_EXAMPLES = """\
List the savepoints of a pipeline, check whether one can be restored, or delete one. They
are kept with the checkpoints of the pipeline, and never expire.

examples:
  exactlyonce savepoints list order-totals
  exactlyonce savepoints verify order-totals 42
  exactlyonce savepoints verify order-totals /backups/order-totals-42-1f2e3d4c
  exactlyonce savepoints delete order-totals 42
"""
_LIST = "List the retained savepoints. A run is not disturbed.\n"
_VERIFY = """\
Read every block of a savepoint, or every file of an exported one, and compare it with its
SHA-256. If it cannot be restored, show the damage, with exit code 1. A run is not
disturbed.
"""
_DELETE = """\
Delete a savepoint: by the run, if the pipeline runs, else at once. Blocks that other
checkpoints need stay. The newest checkpoint is never deleted: the next run goes on from
it. An exported savepoint goes with its folder: first the file that makes it a savepoint;
on a full disk, that one last.
"""


def add(parser: Parser) -> None:
    usage = "list|verify|delete PIPELINE [N] [options]"
    set_command(parser, usage, _EXAMPLES, show)
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True, prog=parser.prog)
    listing = add_action(actions, "list", "PIPELINE [options]", "list the retained savepoints", _LIST, show)
    add_pipeline_name(listing)
    listing.add_argument("--json", action="store_true", help="as one JSON document")
    verifying = add_action(actions, "verify", "PIPELINE N|URL [options]", "read and check one", _VERIFY, verify)
    verifying.add_argument("--json", action="store_true", help="as one JSON document")
    deleting = add_action(actions, "delete", "PIPELINE N|URL [options]", "delete one", _DELETE, delete)
    for action in (verifying, deleting):
        add_pipeline_name(action)
        action.add_argument("savepoint", metavar="N|URL", help="its number, as listed, or the URL of an exported one")
    deleting.add_argument("--timeout", metavar="T", default="2m", help="how long to wait for the run (default: 2m)")
    for action in actions.choices.values():
        add_cluster(action)


def show(args: argparse.Namespace) -> int:
    from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_history

    config = client(args)
    history = read_history(config, pipeline_name(args))
    savepoints = [*history.savepoints.values()]
    if args.json:
        listed = [_as_json(savepoint, finalized=savepoint.checkpoint in history.finalized) for savepoint in savepoints]
        print(msgspec.json.encode(listed).decode())
    elif not savepoints:
        print(f"{history.pipeline} has no savepoints in its topic.")
    else:
        print(*as_text(savepoints, history.finalized, text.terminal_width()), sep="\n")
    return 0


def _as_json(manifest: Manifest, *, finalized: bool) -> dict[str, Any]:
    return {
        "checkpoint": manifest.checkpoint, "state": "finalized" if finalized else "decided",
        "completed_at_ms": manifest.completed_at_ms, "state_bytes": manifest.state_bytes,
        "parallelism": manifest.parallelism, "max_parallelism": manifest.max_parallelism, "offsets": manifest.offsets,
    }  # fmt: skip


def as_text(savepoints: Sequence[Manifest], finalized: Container[int], width: int) -> Iterator[str]:
    """Savepoints for people, each with Sn of its sources, in lines of at most *width* columns."""
    rows = [
        (
            *(str(savepoint.checkpoint), "finalized" if savepoint.checkpoint in finalized else "decided"),
            *(text.moment(savepoint.completed_at_ms), shown_bytes(savepoint.state_bytes)),
        )
        for savepoint in savepoints
    ]
    header, *lines = text.table((">id", "state", "completed", ">state size"), rows)
    yield header
    indent = " " * header.index("state")
    for savepoint, line in zip(savepoints, lines, strict=True):
        yield line
        labels = text.sn_by_source(savepoint)
        label_width = max(map(len, labels), default=0) + 2
        for label, places in labels.items():
            yield from text.labelled(label, places, label_width, width, indent)


def verify(args: argparse.Namespace) -> int:
    from exactlyonce.views.checkpoints import verified, verified_export

    pipeline = pipeline_name(args)
    if args.savepoint.isdecimal():
        verification, noun = verified(client(args), pipeline, int(args.savepoint)), "block"
        damage = [f"Savepoint {verification.checkpoint} cannot be restored: {damage}" for damage in verification.damage]
        title = f"Savepoint {verification.checkpoint}"
    else:
        verification, noun = verified_export(_url(args.savepoint)), "file"
        damage, title = [*verification.damage], f"Savepoint {verification.checkpoint} of {verification.pipeline}"
    if args.json:
        print(text.document(verification))
        return _DAMAGED if damage else 0
    if not damage and verification.pipeline != pipeline:
        print(f"It is a savepoint of {verification.pipeline}, not of {pipeline}.")
    if damage:
        print(*damage, sep="\n")
        return _DAMAGED
    if not verification.finalized:
        print(f"{title} is decided, and may not be committed yet: the next run finishes it.")
    print(f"{title} is intact: {counted(verification.parts, noun)}, unchanged.")
    return 0


def _url(place: str) -> str:
    """The URL of an exported savepoint at *place*; ConfigError unless it is a storage."""
    from exactlyonce.checkpoint.records.storage_url import storage_url
    from exactlyonce.engines.configuration import absolute

    url = absolute(place)
    storage_url(url, "N|URL", or_else="the number of a savepoint, as listed")
    return url


def delete(args: argparse.Namespace) -> int:
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
