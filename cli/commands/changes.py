"""`exactlyonce changes`: makes and removes what captures the changes of tables in their database."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from exactlyonce.cli import text
from exactlyonce.cli.arguments import Commands, add_command, add_pipeline, loaded
from exactlyonce.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from exactlyonce.connectors.postgres.changes import PostgresSlot

_DECLINED = 1
_EXAMPLES = """\
Make or remove the publication and the replication slot that the PostgresChanges of a
pipeline share. Each statement is printed, and run in the database of dsn=. From setup on
the server keeps its log until the pipeline has read it: drop what is not read any more.

examples:
  exactlyonce changes setup shop:pipeline --dry-run
  exactlyonce changes setup shop:pipeline
  exactlyonce changes drop shop:pipeline --yes
"""
_SETUP = """\
Make what is not there, and publish tables that are new to the pipeline. The role of dsn=
owns the tables, has CREATE on the database and REPLICATION; `exactlyonce acls` prints what
a role needs that only runs the pipeline.
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
    for slot in _slots(args):
        _show(slot, slot.setup(dry_run=args.dry_run))
    return 0


def drop(args: argparse.Namespace) -> int:
    slots = _slots(args)
    found = [(slot, slot.drop(dry_run=True)) for slot in slots]
    for slot, statements in found:
        _show(slot, statements)
    if args.dry_run or not any(statements for _, statements in found):
        return 0
    if not args.yes and not text.agreed("Drop them?"):
        print("Nothing was changed.")
        return _DECLINED
    for slot in slots:
        slot.drop()
    return 0


def _slots(args: argparse.Namespace) -> list[PostgresSlot]:
    """The slots of the pipeline; ConfigError if there are none."""
    from exactlyonce.connectors.postgres.changes import slots_of

    graph = loaded(args).pipeline.build()
    if not (slots := slots_of(graph)):
        raise ConfigError(f"{graph.pipeline_id} has no source that captures changes, as PostgresChanges.")
    return slots


def _show(slot: PostgresSlot, statements: list[str]) -> None:
    """Print the statements as a script for psql."""
    print(f"-- slot {slot.name}: {', '.join(slot.members)}" + ("" if statements else ": there is nothing to do"))
    print(*(f"{statement};\n" for statement in statements), sep="", end="")
