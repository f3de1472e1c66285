"""A command's own folder: gone with the command, or with the next one, and never anybody else's."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from exactlyonce.engines.bounded.workplace import MAGIC, OWNER, SILENCE_S, workplace

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
            assert [each.name for each in tmp_path.glob("exactlyonce-held.*/staged")] == ["staged"]
    other.kill()
    other.wait()
    other.stdout.close()
    with workplace(tmp_path, "one"):
        assert list(tmp_path.glob("exactlyonce-held.*")) == []
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a-file", "foreign"]


def test_another_machines_is_left_while_it_beats(tmp_path: Path) -> None:
    """Locks of another machine may not be seen here: what counts is that its command has not beaten for long."""
    folder = _folder(tmp_path / "exactlyonce-theirs", MAGIC + b"\nanother-machine")
    with workplace(tmp_path, "one"):
        assert folder.exists()
    _silence(folder)
    with workplace(tmp_path, "one"):
        assert not folder.exists()


@pytest.mark.parametrize(
    ("name", "owner", "text"),
    [
        ("warehouse", "owner", b"team-data"),
        ("warehouse", OWNER, MAGIC + b"\n"),
        ("exactlyonce-data", "owner", MAGIC + b"\n"),
        ("exactlyonce-data", OWNER, b"team-data"),
        ("exactlyonce-data", OWNER, b"\xff\xfe\x00"),
        ("exactlyonce-data", OWNER, b""),
    ],
)
def test_a_strangers_folder_stays(name: str, owner: str, text: bytes, tmp_path: Path) -> None:
    """Only what has the name and the magic text of a command's folder is removed, however old the rest is."""
    folder = _folder(tmp_path / name, text, owner)
    _silence(folder, owner)
    with workplace(tmp_path, "one"):
        pass
    assert (folder / "staged").exists()


def test_links_are_not_followed(tmp_path: Path) -> None:
    """Neither a link to a folder nor one in place of the owner file leads to anything that is removed."""
    shared = tmp_path / "shared"
    shared.mkdir()
    elsewhere = _folder(tmp_path / "exactlyonce-elsewhere", MAGIC + b"\n")
    _silence(elsewhere)
    (shared / "exactlyonce-link").symlink_to(elsewhere)
    linked = shared / "exactlyonce-linked"
    linked.mkdir()
    (linked / OWNER).symlink_to(elsewhere / OWNER)
    with workplace(shared, "one"):
        pass
    assert (elsewhere / "staged").exists()
    assert linked.exists()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_without_locks_the_heartbeat_counts(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system without locks a command runs, its folder is left while it beats, also by one that can lock it,
    and is removed once it has not for long."""

    def refuse(file: int, how: int) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", refuse)
        with workplace(tmp_path, "one") as folder, workplace(tmp_path, "two"):
            patched.undo()
            with workplace(tmp_path, "three"):
                assert folder.exists()
            patched.setattr(fcntl, "flock", refuse)
            _silence(folder)
            with workplace(tmp_path, "four"):
                assert not folder.exists()


def _folder(folder: Path, text: bytes, owner: str = OWNER) -> Path:
    folder.mkdir()
    (folder / owner).write_bytes(text)
    (folder / "staged").write_text("x")
    return folder


def _silence(folder: Path, owner: str = OWNER) -> None:
    then = (folder / owner).stat().st_mtime - SILENCE_S - 1
    os.utime(folder / owner, (then, then))
