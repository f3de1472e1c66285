"""`exactlyonce changes`: makes and removes what captures the changes of tables in their database."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from exactlyonce.cli import text
from exactlyonce.cli.arguments import Parser, add_action, add_pipeline, loaded, set_command
from exactlyonce.pipeline.errors import ConfigError, StoreError, StoreUnavailable

if TYPE_CHECKING:
    from exactlyonce.connectors.changes import ChangeLog

_DECLINED = 1
_EXAMPLES = """\
Make or remove the publication and the replication slot that the PostgresChanges of a
pipeline share. Each statement is printed, and run in the database of dsn=. From setup on
the server keeps its log until the pipeline has read it: drop what is not read any more.
For MySQLChanges there is nothing to make: setup checks the server and the tables.

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


def add(parser: Parser) -> None:
    set_command(parser, "setup|drop MODULE:PIPELINE [options]", _EXAMPLES, set_up)
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True, prog=parser.prog)
    usage = "MODULE:PIPELINE [options]"
    setting_up = add_action(actions, "setup", usage, "make publications and slots", _SETUP, set_up)
    dropping = add_action(actions, "drop", usage, "remove them", _DROP, drop)
    for action in (setting_up, dropping):
        add_pipeline(action)
        action.add_argument("--dry-run", action="store_true", help="only print the statements")
    dropping.add_argument("--yes", action="store_true", help="do not ask")


def set_up(args: argparse.Namespace) -> int:
    for log in _logs(args):
        with _explained():
            statements = log.setup(dry_run=args.dry_run)
        _show(log, statements)
    return 0


def drop(args: argparse.Namespace) -> int:
    logs = _logs(args)
    found = [(log, log.drop(dry_run=True)) for log in logs]
    for log, statements in found:
        _show(log, statements)
    if args.dry_run or not any(statements for _, statements in found):
        return 0
    if not args.yes and not text.agreed("Drop them?"):
        print("Nothing was changed.")
        return _DECLINED
    with _explained():
        for log in logs:
            log.drop()
    return 0


@contextmanager
def _explained() -> Iterator[None]:
    """Errors of a database say what they mean for this command, which asks once and has rights of its own."""
    try:
        yield
    except StoreUnavailable as error:
        raise StoreUnavailable(f"{error.what} Then run this again: what is made already stays.") from error
    except StoreError as error:
        if _NO_RIGHT not in str(error):
            raise
        what = str(error).partition(": GRANT it")[0]
        raise StoreError(
            f"{what}. Setup needs more than a run does: the role owns the tables, has CREATE on the database and "
            f"REPLICATION. Run it as such a role, with another value of what dsn= names; what is made already stays."
        ) from error


_NO_RIGHT = "[42501]"


def _logs(args: argparse.Namespace) -> list[ChangeLog]:
    """The logs that the pipeline reads; ConfigError if there are none."""
    from exactlyonce.connectors.changes import logs_of

    graph = loaded(args).pipeline.build()
    if not (logs := logs_of(graph)):
        raise ConfigError(f"{graph.pipeline_id} has no source that captures changes, as PostgresChanges.")
    return logs


def _show(log: ChangeLog, statements: list[str]) -> None:
    """Print the statements as a script for the database's client."""
    print(f"-- {log.shown}: {', '.join(log.members)}" + ("" if statements else f": {log.nothing}"))
    print(*(f"{statement};\n" for statement in statements), sep="", end="")
