"""A command's own folder: gone with the command, or with the next one, and never anybody else's."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from exactlyonce.engines.bounded.unit.staging import FrameWriter
from exactlyonce.engines.bounded.workplace import MAGIC, OWNER, SILENCE_S, free_bytes, workplace
from exactlyonce.pipeline.errors import ConfigError

HOLDING = """
import sys, threading
from pathlib import Path
from exactlyonce.engines.bounded.workplace import workplace
with workplace(sys.argv[1], "held") as files:
    Path(f"{files}staged").write_text("x")
    print("there", flush=True)
    threading.Event().wait()
"""


def leave(folder: Path, text: bytes, owner: str = OWNER) -> Path:
    """A folder that somebody has left, with something in it."""
    folder.mkdir()
    (folder / owner).write_bytes(text)
    (folder / "staged").write_text("x")
    return folder


def silence(folder: Path, owner: str = OWNER) -> None:
    then = (folder / owner).stat().st_mtime - SILENCE_S - 1
    os.utime(folder / owner, (then, then))


def is_left_by_the_next(folder: Path, shared: Path) -> bool:
    with workplace(shared, "next"):
        return (folder / "staged").exists()


def test_it_goes_with_its_command(tmp_path: Path) -> None:
    with workplace(tmp_path / "shared", "one") as files:
        folder = Path(files)
        (folder / "staged").write_text("x")
        assert folder.stat().st_mode & 0o777 == 0o700
    assert list((tmp_path / "shared").iterdir()) == []


def test_the_room_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    room = free_bytes(tmp_path / "new" / "folder")
    assert room is not None
    assert room > 0
    assert free_bytes("s3://bucket/staging") is None


def fill(disk: Path) -> None:
    with (disk / "ballast").open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass


def test_a_full_folder_is_an_error_that_names_it_and_leaves_nothing_behind(small_disk: Path) -> None:
    """An owner file without its text would be nobody's, and its folder would stay."""
    with workplace(small_disk, "one") as files:
        writer = FrameWriter(f"{files}staged", 1)
        writer.write(0, bytes(300_000), 1)
        with pytest.raises(ConfigError, match=r"staged cannot be written: No space left on device\. Make room"):
            writer.close()
    assert list(small_disk.iterdir()) == []
    fill(small_disk)
    expected = f"^The staging folder {small_disk} cannot be used: No space left on device"
    with pytest.raises(ConfigError, match=expected), workplace(small_disk, "two"):
        pass
    assert list(small_disk.iterdir()) == [small_disk / "ballast"]


def test_an_error_of_the_work_is_no_error_of_the_folder(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"^the work's own$"), workplace(tmp_path, "one"):
        raise OSError("the work's own")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/staging cannot be used: Not a directory"):
        workplace(tmp_path / "file" / "staging", "two").__enter__()


def test_only_what_the_dead_have_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "foreign").mkdir()
    (tmp_path / "a-file").write_text("x")
    with subprocess.Popen([sys.executable, "-c", HOLDING, str(tmp_path)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "there\n"
        (held,) = tmp_path.glob("exactlyonce-held.*")
        for number in (signal.SIGSTOP, signal.SIGCONT):
            other.send_signal(number)
            assert is_left_by_the_next(held, tmp_path)
        other.kill()
    assert not is_left_by_the_next(held, tmp_path)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a-file", "foreign"]


def test_another_machines_is_left_while_it_beats(tmp_path: Path) -> None:
    """Locks of another machine may not be seen here: what counts is that its command has not beaten for long."""
    folder = leave(tmp_path / "exactlyonce-theirs", MAGIC + b"\nanother-machine")
    assert is_left_by_the_next(folder, tmp_path)
    silence(folder)
    assert not is_left_by_the_next(folder, tmp_path)


def test_another_machine_of_the_same_name(tmp_path: Path) -> None:
    """Its lock is not seen here either; the name alone says nothing."""
    folder = leave(tmp_path / "exactlyonce-theirs", MAGIC + f"\n{socket.gethostname()} another-boot".encode())
    assert is_left_by_the_next(folder, tmp_path)


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
    folder = leave(tmp_path / name, text, owner)
    silence(folder, owner)
    assert is_left_by_the_next(folder, tmp_path)


def test_links_are_not_followed(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    elsewhere = leave(tmp_path / "exactlyonce-elsewhere", MAGIC + b"\n")
    silence(elsewhere)
    linked = shared / "exactlyonce-linked"
    linked.mkdir(parents=True)
    (linked / OWNER).symlink_to(elsewhere / OWNER)
    (shared / "exactlyonce-link").symlink_to(elsewhere)
    assert is_left_by_the_next(elsewhere, shared)
    assert linked.exists()


def test_without_locks_the_heartbeat_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr("exactlyonce.engines.bounded.workplace.BEAT_S", SILENCE_S)
    with workplace(tmp_path, "one") as files:
        folder = Path(files)
        (folder / "staged").write_text("x")
        assert is_left_by_the_next(folder, tmp_path)
        monkeypatch.undo()
        assert is_left_by_the_next(folder, tmp_path)
        monkeypatch.setattr(fcntl, "flock", refuse)
        silence(folder)
        assert not is_left_by_the_next(folder, tmp_path)
