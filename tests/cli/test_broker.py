"""`exactlyonce broker`: start, status and stop of a real one."""

from __future__ import annotations

from pathlib import Path

import pytest

from exactlyonce.connectors.embedded.broker import answers
from exactlyonce.testing.cluster import LIMIT_S
from tests.cli.conftest import Command


@pytest.fixture
def folder(tmp_path: Path) -> tuple[str, str]:
    return "--data-dir", str(tmp_path / "kafka")


@pytest.mark.broker
def test_life_of_a_broker(command: Command, folder: tuple[str, str]) -> None:
    started = command.process("broker", "start", "--port", "0", "--set", "num.partitions=3", *folder)
    try:
        assert started.code == 0, started.err
        name, _, address = started.out.strip().partition("=")
        assert name == "export EXACTLYONCE_BOOTSTRAP_SERVERS"
        assert answers(address, timeout_s=LIMIT_S)
        assert "num.partitions=3\n" in (Path(folder[1]) / "server.properties").read_text()
        shown = dict(line.split(maxsplit=1) for line in command("broker", "status", *folder).out.splitlines())
        assert (shown["running"], shown["address"], shown["data"]) == ("yes", address, folder[1])
        second = command("broker", "start", "--port", "0", *folder)
        assert (second.code, second.out) == (2, "")
        assert f"on {address} (process {shown['process']})" in second.err
    finally:
        stopped = command("broker", "stop", *folder)
    assert (stopped.code, stopped.out) == (0, "")
    assert stopped.err == f"The broker on {address} has stopped; its data stays in {folder[1]}.\n"
    assert not answers(address, timeout_s=1)
    ended = command("broker", "status", *folder)
    assert (ended.code, ended.out.splitlines()[0]) == (1, "running   no")


def test_nothing_to_stop(command: Command, folder: tuple[str, str]) -> None:
    ended = command("broker", "stop", *folder)
    assert (ended.code, ended.err) == (0, f"No broker runs on {folder[1]}.\n")


def test_folder_that_cannot_be(command: Command) -> None:
    (command.folder / "file").write_text("")
    ended = command("broker", "start", "--data-dir", "file/kafka")
    assert (ended.code, ended.out) == (2, "")
    assert "cannot keep its data in" in ended.err
    assert "Not a directory. Choose another folder (--data-dir)." in ended.err
