"""`exactlyonce changes`: makes and removes what captures the changes of tables in their database."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from exactlyonce.cli import text
from exactlyonce.cli.arguments import Commands, add_command, add_pipeline, loaded
from exactlyonce.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from exactlyonce.connectors.postgres.changes import PostgresChanges

_DECLINED = 1
_EXAMPLES = """\
Make or remove the publication and the replication slot of each PostgresChanges of a
pipeline. Each statement is printed, and run in the database of dsn=. From setup on the
server keeps its log until the pipeline has read it: drop what is not read any more.

examples:
  exactlyonce changes setup shop:pipeline --dry-run
  exactlyonce changes setup shop:pipeline
  exactlyonce changes drop shop:pipeline --yes
"""
_SETUP = """\
Make what is not there. The role of dsn= owns the table, has CREATE on the database and
REPLICATION; `exactlyonce acls` prints what a role needs that only runs the pipeline.
"""
_DROP = """\
Remove the slots and the publications; the pipeline does not run. Changes from then on are
not captured: a later run begins with `exactlyonce changes setup` and `exactlyonce reset`.
The command shows the statements, and asks.
"""


def add(commands: Commands) -> None:
    summary = "set up the capture of a table's changes"
    parser = add_command(commands, "changes", "setup|drop MODULE:PIPELINE [options]", summary, _EXAMPLES, set_up)
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True, prog=parser.prog)
    usage = "MODULE:PIPELINE [options]"
    setting_up = add_command(actions, "setup", usage, "make publications and slots", _SETUP, set_up)
    dropping = add_command(actions, "drop", usage, "remove them", _DROP, drop)
    for action in (setting_up, dropping):
        add_pipeline(action)
        action.add_argument("--dry-run", action="store_true", help="only print the statements")
    dropping.add_argument("--yes", action="store_true", help="do not ask")


def set_up(args: argparse.Namespace) -> int:
    for id, source in _sources(args):
        there = f"nothing to do, slot {source.slot_name} is there; a second pipeline needs its own slot="
        _show(id, source, source.setup(dry_run=args.dry_run), there)
    return 0


def drop(args: argparse.Namespace) -> int:
    sources = list(_sources(args))
    found = [(id, source, source.drop(dry_run=True)) for id, source in sources]
    for id, source, statements in found:
        _show(id, source, statements, "there is nothing to do")
    if args.dry_run or not any(statements for *_, statements in found):
        return 0
    if not args.yes and not text.agreed("Drop them?"):
        print("Nothing was changed.")
        return _DECLINED
    for _, source in sources:
        source.drop()
    return 0


def _sources(args: argparse.Namespace) -> Iterator[tuple[str, PostgresChanges[Any]]]:
    """The sources that capture changes, by id; ConfigError if there are none."""
    from exactlyonce.connectors.postgres.changes import PostgresChanges

    graph = loaded(args).pipeline.build()
    sources = [(node.id, node.source) for node in graph.sources if isinstance(node.source, PostgresChanges)]
    if not sources:
        raise ConfigError(f"{graph.pipeline_id} has no source that captures changes, as PostgresChanges.")
    yield from sources


def _show(id: str, source: PostgresChanges[Any], statements: list[str], otherwise: str) -> None:
    """Print the statements as a script for psql, or *otherwise* if there are none."""
    print(f"-- {id}: {source.table}" + ("" if statements else f": {otherwise}"))
    print(*(f"{statement};\n" for statement in statements), sep="", end="")
