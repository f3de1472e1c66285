"""`exactlyonce init`: the files, and that they run as their README says."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from exactlyonce.cli.commands.init import STARTERS
from exactlyonce.testing.cluster import KafkaCluster
from exactlyonce.testing.servers.postgres import PostgresServer
from tests.cli.conftest import Command

FOLDERS = Path(__file__).parents[2] / "cli" / "commands" / "starters"


def test_what_there_is(command: Command) -> None:
    lines = command.done("init", "--list").out.splitlines()
    assert [line.split()[0] for line in lines] == [*STARTERS]
    assert "visits of each page" in lines[1]
    ended = command("init", "--starter", "total")
    assert (ended.code, "invalid choice: 'total'" in ended.err) == (2, True)


@pytest.mark.parametrize("name", STARTERS)
def test_writes_the_starter(command: Command, name: str) -> None:
    ended = command("init", "a/b", "--starter", name)
    assert (ended.code, ended.err) == (0, "")
    written = {path.name: path.read_text() for path in (command.folder / "a" / "b").iterdir()}
    own = {path.name: path.read_text() for path in (FOLDERS / name).iterdir() if path.is_file()}
    assert written == {**own, "feed.py": written["feed.py"]} if "feed.py" in written else own
    assert ended.out.startswith("Wrote pipeline.py, test_pipeline.py, README.md")
    assert "  cd a/b\n" in ended.out
    assert "  exactlyonce run pipeline:pipeline --bootstrap-servers 127.0.0.1:9092" in ended.out


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", STARTERS)
def test_the_test_of_a_starter(command: Command, name: str) -> None:
    """It needs neither Kafka nor a store."""
    for library in {"changes": ("deltalake",), "model": ("sklearn", "pyarrow")}.get(name, ()):
        pytest.importorskip(library)
    command.done("init", "--starter", name)
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"], cwd=command.folder, text=True,
        capture_output=True, env={**os.environ, "ORDERS_DSN": "", "SHOP_DSN": ""},
    )  # fmt: skip
    assert tested.returncode == 0, tested.stdout
    assert "1 passed" in tested.stdout


def test_the_cluster_that_the_environment_names(command: Command) -> None:
    """All commands that are to be typed name it, and none starts a broker."""
    ended = command("init", "shop", EXACTLYONCE_BOOTSTRAP_SERVERS="kafka:9094")
    said = ended.out + (command.folder / "shop" / "README.md").read_text()
    assert said.count("--bootstrap-servers kafka:9094") == 4
    assert "9092" not in said
    assert "exactlyonce broker" not in said
    assert "To begin anew: `exactlyonce reset order-totals --bootstrap-servers kafka:9094`.\n" in said


def test_never_overwrites(command: Command) -> None:
    (command.folder / "show.py").write_text("mine")
    ended = command("init")
    assert (ended.code, ended.out) == (2, "")
    assert "has show.py already: nothing was written" in ended.err
    assert [path.name for path in command.folder.iterdir()] == ["show.py"]
    assert (command.folder / "show.py").read_text() == "mine"


def test_where_no_folder_can_be(command: Command) -> None:
    (command.folder / "mine").write_text("mine")
    for name in ("mine", "mine/totals"):
        ended = command("init", name)
        assert (ended.code, ended.out) == (2, "")
        assert f"{name} cannot be created:" in ended.err


def test_first_day(
    command: Command, kafka: KafkaCluster, topic_name: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("EXACTLYONCE_BOOTSTRAP_SERVERS", kafka.bootstrap_servers)
    command.done("init")
    for file in command.folder.glob("*.py"):  # other tests may have topics of the starter's names
        text = file.read_text().replace('"order-totals"', f'"{topic_name}-totals"')
        for used in ('KafkaSource("{}"', 'NewTopic("{}"', '["{}"]', 'produce("{}"'):
            text = text.replace(used.format("orders"), used.format(topic_name))
        file.write_text(text)

    def script(file: str) -> str:
        runpy.run_path(str(command.folder / file), run_name="__main__")
        return str(capsys.readouterr().out)

    for updates, ann in (("990", "9,500"), ("1,980", "19,000")):
        assert script("feed.py") == "1,000 orders written.\n"
        command.done("run", "pipeline:pipeline", "--until", "latest", "--inline")
        shown = script("show.py").splitlines()
        assert (shown[0].split(), shown[-1]) == (["ann", ann], f"{updates} updates")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "last"),
    [
        ("postgres", "ann      |  9500"),
        ("changes", "'city': 'Oslo'"),
        ("model", "1,000 payments, 0 of them twice"),
    ],
)
def test_commands_of_a_readme(
    command: Command, kafka: KafkaCluster, topic_name: str, postgres_server: PostgresServer, name: str, last: str
) -> None:
    """With the servers of the test."""
    command.done("init", "--starter", name)
    for file in command.folder.iterdir():  # other tests may have topics of the starter's names
        text = file.read_text()
        for pipeline in ("orders-to-postgres", "payments-scored"):
            text = text.replace(pipeline, f"{topic_name}-totals")
        for used in ('KafkaSource("{}"', 'NewTopic("{}"', '["{}"]', 'produce("{}"', 'DeadLetters("{}-dead"'):
            for topic in ("orders", "payments"):
                text = text.replace(used.format(topic), used.format(topic_name))
        file.write_text(text)
    readme = (command.folder / "README.md").read_text().replace("127.0.0.1:9092", kafka.bootstrap_servers)
    lines = readme.partition("```sh\n")[2].partition("```")[0].splitlines()
    dsn = postgres_server.dsn()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "ORDERS_DSN": dsn, "SHOP_DSN": dsn}
    env["EXACTLYONCE_BOOTSTRAP_SERVERS"] = kafka.bootstrap_servers
    said = ""
    for line in lines:
        if not line.startswith(("export", "exactlyonce broker")):
            ended = subprocess.run(line, shell=True, cwd=command.folder, env=env, text=True, capture_output=True)
            assert ended.returncode == 0, f"{line}: {ended.stderr}"
            said = ended.stdout
    assert last in said
    assert "bob" not in said or name == "postgres", "its row was deleted"
