"""`exactlyonce acls` prints the rights of docs/settings.md, which tests/test_docs_access.py tries on a broker."""

from __future__ import annotations

from collections.abc import Callable

from tests.cli.conftest import Command

MODULE = """\
from exactlyonce import Pipeline
from exactlyonce.connectors import KafkaSource
from exactlyonce.sinks import KafkaSink

pipeline = Pipeline("totals")
numbers = pipeline.source("numbers", KafkaSource("numbers", value=int, start_group="before"))
numbers.sink("out", KafkaSink("out"))
"""
NAMES = {
    "each input": "numbers", "each output": "out", "each output that is missing": "out", "each `start_group`": "before",
}  # fmt: skip


def test_the_rights_are_those_of_the_page(command: Command, table: Callable[..., list[dict[str, str]]]) -> None:
    (command.folder / "numbers_.py").write_text(MODULE)
    printed = command.done("acls", "numbers_:pipeline", "--principal", "User:ann", "--reset").out.splitlines()
    start = "kafka-acls --bootstrap-server $EXACTLYONCE_BOOTSTRAP_SERVERS --add --allow-principal User:ann --operation "
    assert all(line.startswith(start) for line in printed)
    rights = set()
    for line in printed:
        *operations, resource = line[len(start) :].split(" --operation ")
        operation, resource = resource.split(" --", 1)
        rights |= {(resource, each) for each in (*operations, operation)}
    documented = set()
    for row in table("docs/settings.md", "resource", "name", "operations", "for"):
        name = NAMES.get(row["name"], row["name"].strip("`").replace("<pipeline>", "totals"))
        kind, _, prefixed = row["resource"].replace("transactional id", "transactional-id").partition(", ")
        resource = f"{kind} {name}".rstrip() + (" --resource-pattern-type prefixed" if prefixed else "")
        documented |= {(resource, operation) for operation in row["operations"].split(", ")}
    assert rights == documented
    without = command.done("acls", "numbers_:pipeline", "--principal", "User:ann", "--no-create").out
    assert "Create" not in without
    command.refused("'ann' is no principal", "acls", "numbers_:pipeline", "--principal", "ann")
