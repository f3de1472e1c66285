"""A command's own folder: gone with the command, or with the next one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from exactlyonce.engines.bounded.workplace import OWNER, SILENCE_S, workplace

HOLDING = """
import sys, threading
from pathlib import Path
from exactlyonce.engines.bounded.workplace import workplace
with workplace(Path(sys.argv[1]), "held") as folder:
    (folder / "staged").write_text("x")
    print("there", flush=True)
    threading.Event().wait()
"""


def test_it_goes_with_its_command(tmp_path: Path) -> None:
    """The folder is there within the block, for this user alone, and gone after it, whatever is in it."""
    with workplace(tmp_path / "shared", "one") as folder:
        (folder / "staged").write_text("x")
        assert folder.stat().st_mode & 0o777 == 0o700
    assert list((tmp_path / "shared").iterdir()) == []


def test_only_what_the_dead_have_left_is_removed(tmp_path: Path) -> None:
    """The next command leaves another one's folder while that lives, also while it is stopped, and removes it once it
    was killed; files and folders that are none of ours stay."""
    (tmp_path / "foreign").mkdir()
    (tmp_path / "a-file").write_text("x")
    other = subprocess.Popen([sys.executable, "-c", HOLDING, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "there\n"
    for number in (signal.SIGSTOP, signal.SIGCONT):
        os.kill(other.pid, number)
        with workplace(tmp_path, "one"):
            assert [each.name for each in tmp_path.glob("held.*/staged")] == ["staged"]
    other.kill()
    other.wait()
    other.stdout.close()
    with workplace(tmp_path, "one"):
        assert list(tmp_path.glob("held.*")) == []
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a-file", "foreign"]


def test_another_machines_is_left_while_it_beats(tmp_path: Path) -> None:
    """Locks of another machine may not be seen here: what counts is that its command has not beaten for long."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    owner = folder / OWNER
    owner.write_text("another-machine")
    with workplace(tmp_path, "one"):
        assert folder.exists()
    then = owner.stat().st_mtime - SILENCE_S - 1
    os.utime(owner, (then, then))
    with workplace(tmp_path, "one"):
        assert not folder.exists()
