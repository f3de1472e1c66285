"""`exactlyonce init`: the files, and that they run as their README says."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from exactlyonce.cli.commands.init import FILES
from exactlyonce.testing.cluster import KafkaCluster
from tests.cli.conftest import Command

STARTER = Path(__file__).parents[2] / "cli" / "commands" / "starter"


def test_writes_the_starter(command: Command) -> None:
    ended = command("init", "a/b")
    assert (ended.code, ended.err) == (0, "")
    written = {path.name: path.read_text() for path in (command.folder / "a" / "b").iterdir()}
    assert written == {path.name: path.read_text() for path in STARTER.iterdir() if path.name in FILES}
    assert sorted(written) == sorted(p.name for p in STARTER.iterdir() if p.name not in ("__init__.py", "__pycache__"))
    assert "  cd a/b\n" in ended.out


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
