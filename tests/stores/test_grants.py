"""The statements of `exactlyonce acls` are enough in real stores, and a run without one of these rights names it."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from exactlyonce.cli.main import main
from exactlyonce.testing.cluster import KafkaCluster
from exactlyonce.testing.servers.postgres import OWNER
from exactlyonce.testing.servers.postgres import PASSWORD as OWNERS_PASSWORD

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.exhaustive]

MODULE = """\
import msgspec

from exactlyonce import Pipeline
from exactlyonce.connectors import KafkaSource
from exactlyonce.sinks import MySQLSink, PostgresSink, RedisSink


class Total(msgspec.Struct):
    customer: str
    cents: int


KEYED = {"mode": "upsert", "key": ("customer",)}
SINKS = {
    "postgres": lambda: PostgresSink("totals", dsn="env:TOTALS_AT", **KEYED),
    "postgres-append": lambda: PostgresSink("totals", dsn="env:TOTALS_AT"),
    "mariadb": lambda: MySQLSink("totals", dsn="env:TOTALS_AT", **KEYED),
    "mariadb-append": lambda: MySQLSink("totals", dsn="env:TOTALS_AT"),
    "redis": lambda: RedisSink("env:TOTALS_AT", key=lambda total: total.customer),
}


def make(name: str, store: str) -> Pipeline:
    pipeline = Pipeline(name)
    pipeline.source("in", KafkaSource(name, value=Total)).sink("out", SINKS[store]())
    return pipeline
"""
TABLE = "CREATE TABLE totals (customer varchar(20) NOT NULL PRIMARY KEY, cents bigint NOT NULL)"
ROWS = "SELECT * FROM totals"
PASSWORD = "s3cret"
OPTIONAL = {"config|get", "command|info", "select", "waitaof"}
"""Rights in Redis without which a run goes on, the last one where the server is older than 7.2."""


class Store(NamedTuple):
    """A store with an empty table, and a user without rights."""

    tool: dict[str, str]
    """The environment of its own client, for an administrator."""
    user: str
    address: str
    """The user's."""
    rows: Callable[[], int]


def store_at(name: str, server: Any, home: Path) -> Store:
    if name.startswith("postgres"):
        database = f"granted_{name.replace('-', '_')}"
        server.execute(f"CREATE DATABASE {database}")
        server.execute(f"REVOKE ALL ON DATABASE {database} FROM PUBLIC")
        server.execute(f"CREATE ROLE {database} LOGIN PASSWORD '{PASSWORD}'")
        for statement in ("REVOKE ALL ON SCHEMA public FROM PUBLIC", TABLE):
            server.execute(statement, database=database)
        owner = {"PGHOST": "127.0.0.1", "PGPORT": str(server.port), "PGUSER": OWNER, "PGPASSWORD": OWNERS_PASSWORD}
        dsn = server.dsn(database, user=database, password=PASSWORD)
        rows = partial(server.execute, ROWS, database=database)
        return Store(owner | {"PGDATABASE": database}, database, dsn, lambda: len(rows()))
    if name.startswith("mariadb"):
        database = f"granted_{name.replace('-', '_')}"
        server.sql(f"CREATE DATABASE {database}", database=None)
        server.sql(f"CREATE USER {database}@'%' IDENTIFIED BY '{PASSWORD}'", database=None)
        server.sql(TABLE, database=database)
        (home / ".my.cnf").write_text(f"[client]\nprotocol=tcp\nhost=127.0.0.1\nport={server.port}\nuser=root\n")
        url = f"mysql://{database}:{PASSWORD}@127.0.0.1:{server.port}/{database}?ssl_mode=disabled"
        return Store({"MYSQL_DATABASE": database}, database, url, lambda: len(server.sql(ROWS, database=database)))
    server.client.acl_setuser("redis", enabled=True, reset=True, passwords=[f"+{PASSWORD}"])
    url = f"redis://redis:{PASSWORD}@127.0.0.1:{server.port}/0"
    return Store({"REDIS_URL": server.url}, "redis", url, lambda: len(server.client.keys("granted*")))


def rights_in(statements: list[str]) -> list[tuple[str, str, str]]:
    """(right, the statement that takes it away, the one that gives it back) of each."""
    found = []
    for statement in statements:
        if granted := re.fullmatch(r"GRANT (.+) ON (.+) TO (.+);", statement):
            rights, resource, user = granted.groups()
            for right in rights.split(", "):
                found.append((right, f"REVOKE {right} ON {resource} FROM {user};", statement))
        elif statement.startswith("ACL SETUSER"):
            head = " ".join(statement.split()[:3])
            found += [(right, f"{head} -{right}", f"{head} +{right}") for right in re.findall(r"\+(\S+)", statement)]
    return found


@pytest.mark.parametrize("name", ["postgres", "postgres-append", "mariadb", "mariadb-append", "redis"])
def test_the_printed_rights_are_enough_and_a_start_without_one_names_it(
    name: str, kafka: KafkaCluster, database_server: Callable[[str], Any], topic_name: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "granted_to.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    server = database_server(name.partition("-")[0])
    store = store_at(name, server, tmp_path)
    monkeypatch.setenv("TOTALS_AT", store.address)
    kafka.create_topic(topic_name)
    pipeline = ("granted_to:make", "--param", f"name={topic_name}", "--param", f"store={name}")

    def run() -> tuple[int, str]:
        to_its_end = ("--until", "latest", "--inline", "--restart", "none")
        code = main(["run", *pipeline, *to_its_end, "--bootstrap-servers", kafka.bootstrap_servers])
        return code, " ".join(capsys.readouterr().err.split())

    def administer(command: str, *statements: str) -> None:
        environment = {**os.environ, **store.tool, "HOME": str(tmp_path)}
        script = "\n".join([f"{command} <<'END'", *statements, "END"])
        done = subprocess.run(["sh", "-ec", script], env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "ERR" not in done.stderr.upper(), done.stderr

    assert main(["acls", *pipeline, "--principal", f"User:{store.user}"]) == 0
    printed = capsys.readouterr().out.partition("# out: ")[2]
    command, *statements = printed.splitlines()[1:-1]
    command = command.removesuffix(" <<'END'")
    administer(command, *statements)
    for number in (1, 2):
        kafka.produce(topic_name, [f'{{"customer": "granted{number}", "cents": 1}}'])
        code, said = run()
        assert code == 0, said
        assert store.rows() == number
    unnamed = []
    for right, revoke, grant in rights_in(statements):
        administer(command, revoke, *(["SCRIPT FLUSH"] if name == "redis" else []))
        code, said = run()
        if (code, right.partition("|")[0].lower() in said.lower()) != (2, True) and right not in OPTIONAL:
            unnamed.append((right, revoke, code, said))
        administer(command, grant)
    assert unnamed == []
    assert run()[0] == 0
