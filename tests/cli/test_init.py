"""`exactlyonce init`: the files, and that they run as their README says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from exactlyonce.cli.commands.init import FILES
from exactlyonce.testing.cluster import LIMIT_S

if TYPE_CHECKING:
    from tests.cli.conftest import Command

STARTER = Path(__file__).parents[2] / "cli" / "commands" / "starter"


def test_writes_the_starter(command: Command) -> None:
    """The files are those of cli/commands/starter, all of them; the folder is created."""
    ended = command("init", "a/b")
    assert (ended.code, ended.err) == (0, "")
    written = {path.name: path.read_text() for path in (command.folder / "a" / "b").iterdir()}
    assert written == {path.name: path.read_text() for path in STARTER.iterdir() if path.name in FILES}
    assert sorted(written) == sorted(p.name for p in STARTER.iterdir() if p.name not in ("__init__.py", "__pycache__"))
    assert "  cd a/b\n" in ended.out


def test_never_overwrites(command: Command) -> None:
    """If one of the files exists, all are left alone."""
    (command.folder / "show.py").write_text("mine")
    ended = command("init")
    assert (ended.code, ended.out) == (2, "")
    assert "has show.py already: nothing was written" in ended.err
    assert [path.name for path in command.folder.iterdir()] == ["show.py"]
    assert (command.folder / "show.py").read_text() == "mine"


def test_where_no_folder_can_be(command: Command) -> None:
    """A file in its place is named."""
    (command.folder / "mine").write_text("mine")
    for name in ("mine", "mine/totals"):
        ended = command("init", name)
        assert (ended.code, ended.out) == (2, "")
        assert f"{name} cannot be made a folder:" in ended.err


def test_pipeline_is_right(command: Command) -> None:
    """The pipeline can be built, with all types known."""
    assert command("init").code == 0
    ended = command("explain", "pipeline:pipeline")
    assert ended.code == 0, ended.err
    assert "stateful_map      <= key_by-after-orders  state int  : Total" in ended.out


@pytest.mark.broker
@pytest.mark.slow
def test_first_day(command: Command, tmp_path: Path) -> None:
    """A broker starts, is fed, the pipeline runs, and an independent reader sees every order counted once."""
    folder = ("--data-dir", str(tmp_path / "kafka"))
    assert command("init").code == 0
    started = command("broker", "start", "--port", "0", *folder)
    assert started.code == 0, started.err
    try:
        name, _, address = started.out.removeprefix("export ").strip().partition("=")
        environment = {**command.environment, name: address}

        def script(file: str) -> str:
            done = subprocess.run(
                [sys.executable, file], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT_S
            )
            assert done.returncode == 0, done.stderr
            return done.stdout

        for updates, ann in (("990", "9,500"), ("1,980", "19,000")):
            assert script("feed.py") == "1,000 orders written.\n"
            ended = command("run", "pipeline:pipeline", "--until", "latest", "--bootstrap-servers", address)
            assert ended.code == 0, ended.err
            shown = script("show.py").splitlines()
            assert (shown[0].split(), shown[-1]) == (["ann", ann], f"{updates} updates")
    finally:
        assert command("broker", "stop", *folder).code == 0
