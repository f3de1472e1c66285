"""Every command that shows something has `--json`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from exactlyonce.cli.main import parser
from tests.cli.conftest import Command, Orders

SHOW_NOTHING = {
    "demo", "init", "completion", "broker start", "broker stop", "ui", "mcp", "state serve", "savepoints delete",
    "dead-letters replay", "dead-letters discard", "reset",
    "changes setup", "changes drop",
}  # fmt: skip
"""Commands that do something, or serve a page or a protocol."""
SHOWN = {
    "run": "orders:pipeline --until latest --inline", "explain": "orders:pipeline",
    "config show": "", "acls": "orders:pipeline --principal User:ann", "checkpoints": "{name}", "top": "{name}",
    "savepoint": "{name} --to {folder}", "savepoints list": "{name}", "savepoints verify": "{name} {url}",
    "state show": "{name} totals",
    "transactions list": "{name}", "doctor": "{name}", "audit": "orders:pipeline --on driver",
    "replay": "orders:pipeline --checkpoint 2 --on driver",
    "diff": "orders:pipeline orders:pipeline --on driver --from 0",
    "backfill": "orders:pipeline --on driver", "catch-up": "orders:pipeline --on driver",
}  # fmt: skip
"""The arguments with which each shows JSON here."""
SHOWN_ELSEWHERE = {
    "broker status", "state import", "cancel", "transactions describe", "transactions commit", "transactions abort",
    "dead-letters list", "dead-letters show",
}  # fmt: skip
"""Those that need a server, a running pipeline, waiting output or dead letters: see the tests of each."""


def commands(within: argparse.ArgumentParser, path: tuple[str, ...] = ()) -> Iterator[tuple[str, set[str]]]:
    """Each command without subcommands, with its options."""
    nested = [action for action in within._actions if isinstance(action, argparse._SubParsersAction)]
    if not nested:
        yield " ".join(path), {option for action in within._actions for option in action.option_strings}
    for action in nested:
        for name, inner in action.choices.items():
            yield from commands(inner, (*path, name))


def test_all_commands_are_known() -> None:
    options = dict(commands(parser()))
    assert {command for command, known in options.items() if "--json" not in known} == SHOW_NOTHING
    assert options.keys() - SHOW_NOTHING == SHOWN.keys() | SHOWN_ELSEWHERE


@pytest.mark.broker
def test_each_shows_json(orders: Orders) -> None:
    orders.ran()
    place = {"name": orders.name, "folder": f"file://{orders.command.folder}", "url": ""}
    for command, arguments in SHOWN.items():
        ended = orders.command(*command.split(), *arguments.format(**place).split(), "--json")
        assert ended.code == 0, (command, ended)
        place["url"] = ended.json["url"] if command == "savepoint" else place["url"]
        documents = ended.out.splitlines() if ended.out.count("\n{") else [ended.out]
        assert all(isinstance(json.loads(document), dict | list) for document in documents if document), command
        assert ended.out or command == "run", command
        assert all(json.loads(line)["event"] for line in ended.err.splitlines()), (command, ended.err)


def test_a_broker_that_does_not_run(command: Command, tmp_path: Path) -> None:
    ended = command("broker", "status", "--data-dir", str(tmp_path), "--json")
    assert (ended.code, ended.json["running"], ended.json["data_dir"]) == (1, False, str(tmp_path))
