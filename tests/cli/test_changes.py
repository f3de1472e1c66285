"""`exactlyonce changes` makes and removes slots and publications; errors of a capture say what to do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from exactlyonce.checkpoint.records.manifest import SourceOffset
from exactlyonce.connectors.changes import logs_of
from exactlyonce.pipeline.loading import load
from exactlyonce.testing.cluster import KafkaCluster
from exactlyonce.testing.servers.postgres import PASSWORD, PostgresServer
from exactlyonce.views.doctor.checks import check_sources
from exactlyonce.views.doctor.findings import Findings
from tests.cli.conftest import Command

MODULE = """\
import msgspec

from exactlyonce import KafkaSink, Pipeline
from exactlyonce.connectors import PostgresChanges


class Customer(msgspec.Struct):
    id: int
    name: str{fields}


pipeline = Pipeline("shop")
customers = PostgresChanges("customers", **{{"dsn": "env:SHOP_DSN", "key": "id", "value": Customer, **{options}}})
pipeline.source("customers", customers).sink("out", KafkaSink("customers"))
"""
NAME = "exactlyonce_shop"


class Shop:
    """A database of its own with a table, and the command."""

    def __init__(self, server: PostgresServer, command: Command) -> None:
        self.server, self.command = server, command
        self.sql("CREATE TABLE customers (id int NOT NULL, name text)")
        self.write()

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        return self.server.execute(statement, database="captured")

    def write(self, fields: str = "", **options: Any) -> None:
        (self.command.folder / "captured_shop.py").write_text(MODULE.format(fields=fields, options=options))

    def there(self) -> list[str]:
        """What captures, by kind."""
        slots = self.sql(f"SELECT 'slot' FROM pg_replication_slots WHERE slot_name = '{NAME}'")
        publications = self.sql(f"SELECT 'publication' FROM pg_publication WHERE pubname = '{NAME}'")
        return [kind for (kind,) in slots + publications]

    def refused(self, text: str) -> None:
        self.command.refused(text, "changes", "setup", "captured_shop:pipeline")


@pytest.fixture
def shop(postgres_server: PostgresServer, command: Command, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    if not postgres_server.execute("SELECT 1 FROM pg_database WHERE datname = 'captured'"):
        postgres_server.execute("CREATE DATABASE captured TEMPLATE template0")
    monkeypatch.setenv("SHOP_DSN", postgres_server.dsn("captured"))
    shop = Shop(postgres_server, command)
    yield shop
    shop.sql(  # a reader that was closed lives in the server for a moment
        "SELECT pg_terminate_backend(active_pid, 10000) FROM pg_replication_slots"
        " WHERE database = 'captured' AND active_pid IS NOT NULL"
    )
    shop.sql("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = 'captured'")
    shop.sql(f"DROP PUBLICATION IF EXISTS {NAME}")
    shop.sql("DROP TABLE customers CASCADE")


def test_setup_and_drop(shop: Shop) -> None:
    shop.sql("CREATE UNIQUE INDEX by_id ON customers (id)")
    kept = ", failover => true" if shop.sql("SELECT current_setting('server_version_num')::int >= 170000")[0][0] else ""
    made = (
        f"-- slot and publication {NAME}: customers\n"
        'ALTER TABLE "public"."customers" REPLICA IDENTITY USING INDEX "by_id";\n'
        f'CREATE PUBLICATION "{NAME}" FOR TABLE "public"."customers";\n'
        f"SELECT pg_create_logical_replication_slot('{NAME}', 'pgoutput'{kept});\n"
    )
    assert shop.command.done("changes", "setup", "captured_shop:pipeline", "--dry-run").out == made
    assert shop.there() == []
    assert shop.command.done("changes", "setup", "captured_shop:pipeline").out == made
    assert shop.there() == ["slot", "publication"]
    assert "nothing to do" in shop.command.done("changes", "setup", "captured_shop:pipeline").out
    assert "pg_drop_replication_slot" in shop.command.done("changes", "drop", "captured_shop:pipeline", "--dry-run").out
    shop.command.refused("Add --yes to agree beforehand", "changes", "drop", "captured_shop:pipeline")
    assert shop.there() == ["slot", "publication"]
    shop.command.done("changes", "drop", "captured_shop:pipeline", "--yes")
    assert shop.there() == []
    assert "nothing to do" in shop.command.done("changes", "drop", "captured_shop:pipeline").out


def test_explain_says_what_is_captured_and_how(shop: Shop) -> None:
    _, slot, part, *_ = shop.command.done("explain", "captured_shop:pipeline").out.splitlines()
    assert f"PostgresSlot slot and publication {NAME}  :" in slot
    assert f"<- slot-{NAME}.customers PostgresChanges rows and changes of customers  : Change[Customer]" in part


def test_the_rights_of_a_role_that_only_runs(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    shop.sql("ALTER TABLE customers ADD PRIMARY KEY (id)")
    shop.command.done("changes", "setup", "captured_shop:pipeline")
    printed = shop.command.done("acls", "captured_shop:pipeline", "--principal", "User:reader").out
    statements = [line for line in printed.splitlines() if line.endswith(";")]
    assert statements[-1] == 'ALTER ROLE "reader" REPLICATION;'
    shop.sql(f"CREATE ROLE reader LOGIN PASSWORD '{PASSWORD}'")
    try:
        monkeypatch.setenv("SHOP_DSN", shop.server.dsn("captured", user="reader"))
        for statement in statements:
            shop.sql(statement.replace(':"DBNAME"', "captured"))
        (slot,) = logs_of(load("captured_shop:pipeline").pipeline.build())
        finder = slot.finder(slot.id)
        (position,) = finder.find(())
        finder.close()
        opened = slot.open_split(position)
        assert opened.read(10) == []
        opened.close()
    finally:
        shop.sql("DROP OWNED BY reader")
        shop.sql("DROP ROLE reader")


def test_a_run_that_halts_says_how_it_goes_on(
    shop: Shop, kafka: KafkaCluster, topic_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All changes before the one that it halts at are in the topic; and its advice works."""
    monkeypatch.setenv("EXACTLYONCE_BOOTSTRAP_SERVERS", kafka.bootstrap_servers)
    pipeline, out = "captured_shop:pipeline", f"{topic_name}-out"

    def run(code: int = 0) -> str:
        ended = shop.command("run", pipeline, "--until", "latest", "--checkpoint-interval", "200ms", "--inline")
        assert ended.code == code, ended
        return ended.said

    def rows() -> list[tuple[int, Any]]:
        found = [json.loads(record.value or b"null") for record in kafka.read_committed(out)]
        return sorted((row["id"], row.get("name", row.get("title"))) for row in found)

    def written(field: str) -> None:
        shop.write(slot=NAME)
        module = shop.command.folder / "captured_shop.py"
        text = (
            module.read_text()
            .replace('"shop"', f'"{topic_name}"')
            .replace('KafkaSink("customers")', f'KafkaSink("{out}")')
        )
        module.write_text(text.replace("name: str", f"{field}: str"))

    written("name")
    shop.sql("ALTER TABLE customers ADD PRIMARY KEY (id)")
    shop.command.done("changes", "setup", pipeline)
    shop.sql("INSERT INTO customers VALUES (1, 'ann')")
    run()
    shop.sql("INSERT INTO customers VALUES (2, 'bob')")
    shop.sql("ALTER TABLE customers RENAME name TO title")
    shop.sql("INSERT INTO customers VALUES (3, 'cid')")
    assert "run the program that fits these changes" in run(6)
    assert rows() == [(1, "ann"), (2, "bob")]
    written("title")
    run()
    assert rows() == [(1, "ann"), (2, "bob"), (3, "cid")]
    shop.sql("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = 'captured'")
    said = run(6)
    steps = ("changes drop", "changes setup", "reset")
    assert all(f"`exactlyonce {step} {pipeline}`" in said for step in steps), said
    for step in steps:
        shop.command.done(*step.split(), pipeline, *([] if step == "changes setup" else ["--yes"]))
    run()
    assert rows() == sorted(2 * [(1, "ann"), (2, "bob"), (3, "cid")])


def test_what_cannot_be_captured_says_why(shop: Shop) -> None:
    shop.refused("it has no unique index on (id), of all rows and in this order: CREATE UNIQUE INDEX")
    shop.sql("ALTER TABLE customers ADD PRIMARY KEY (id)")
    shop.write(key="number")
    shop.refused("key='number': Customer has no field 'number'")
    shop.write(fields="\n    number: int", key="number")
    shop.refused("it has no column 'number', which key= names")
    shop.write(fields="\n    tier: int")
    shop.refused("it has no column 'tier', which the record's type has, without a default")
    shop.write(dsn="postgresql://ann:hunter2@127.0.0.1/shop")
    shop.refused("has a password written out")
    assert shop.there() == []


def test_a_pipeline_without_captured_changes(shop: Shop) -> None:
    text = (shop.command.folder / "captured_shop.py").read_text()
    text = text[: text.index("customers =")].replace("import KafkaSink", "import KafkaSink, KafkaSource")
    text += 'pipeline.source("in", KafkaSource("in", value=int)).sink("out", KafkaSink("out"))\n'
    (shop.command.folder / "captured_shop.py").write_text(text)
    shop.refused("shop has no source that captures changes")


def examined(shop: Shop, *positions: SourceOffset) -> tuple[list[str], dict[str, str]]:
    """What the doctor has checked, and what it has found: each fault with its remedy. *positions*: of a checkpoint."""
    newest = SimpleNamespace(offsets=positions) if positions else None
    found, subject = Findings(), SimpleNamespace(graph=load("captured_shop:pipeline").pipeline.build(), newest=newest)
    check_sources(cast("Any", subject), found)
    assert found.unchecked == []
    return found.checked, {diagnosis.what: diagnosis.do for diagnosis in found.diagnoses}


def test_the_doctor_examines_the_server(shop: Shop) -> None:
    shop.sql("ALTER TABLE customers ADD PRIMARY KEY (id)")
    checked, problems = examined(shop)
    assert checked == [f"the server of source slot-{NAME}, slot {NAME}: missing"]
    assert any("there is no replication slot" in what for what in problems)
    (count,) = shop.sql("SELECT current_setting('max_replication_slots')::int - count(*) FROM pg_replication_slots")
    for number in range(*count):
        shop.sql(f"SELECT pg_create_logical_replication_slot('taken_{number}', 'pgoutput')")
    _, problems = examined(shop)
    assert any(f"no room for slot {NAME}" in what for what in problems)
    shop.sql("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name LIKE 'taken%'")
    shop.command.done("changes", "setup", "captured_shop:pipeline")
    checked, problems = examined(shop)
    assert checked[0].endswith("of log kept, reserved")
    (what,) = problems
    assert what.startswith(f"The server keeps log for slot {NAME} ")
    (slot,) = logs_of(load("captured_shop:pipeline").pipeline.build())
    (position,) = slot.finder(slot.id).find(())
    shop.sql("INSERT INTO customers VALUES (1, 'ann')")
    assert len(examined(shop, position)[1]) == 1
    shop.sql(f"SELECT pg_replication_slot_advance('{NAME}', pg_current_wal_lsn())")
    _, problems = examined(shop, position)
    assert any("its slot has forgotten all before" in what for what in problems)
    shop.sql("ALTER TABLE customers REPLICA IDENTITY NOTHING")
    shop.sql(f"ALTER PUBLICATION {NAME} SET (publish = 'insert')")
    _, problems = examined(shop)
    said = {what.partition(" cannot be captured: ")[2]: do for what, do in problems.items()}
    assert "`exactlyonce changes setup`" in said["its replica identity is nothing, and key= id"]
    assert said[f"publication {NAME} leaves out operations"].startswith(f"ALTER PUBLICATION {NAME} SET")
