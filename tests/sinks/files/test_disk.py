"""Folders that cannot be written to: missing, forbidden, full, on a disk of another kind."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import pytest

from exactlyonce.pipeline.errors import StoreError, StoreUnavailable
from exactlyonce.sinks.writer import SinkFailed
from exactlyonce.testing.sink_contract.hooks import ORIGIN

NOBODY = 65534
_READ_ONLY_NOW = 33
"""MS_REMOUNT and MS_RDONLY."""


def test_a_folder_is_made_where_its_parent_is(target) -> None:
    for _ in range(2):
        target.committer().check()
    assert os.listdir(target.folder) == [".exactlyonce"]
    assert os.listdir(target.root / "temporary") == []


def test_a_parent_that_is_missing_is_an_error(make_target) -> None:
    target = make_target()
    target.sink = type(target.sink)(target.folder / "a" / "b", format="jsonl")
    with pytest.raises(StoreError, match=r"/a does not exist: create the folder, or mount it"):
        target.committer().check()


def test_a_target_that_is_no_folder_is_an_error(target) -> None:
    target.folder.symlink_to("nowhere")
    with pytest.raises(
        StoreError, match=rf"{target.folder} cannot be made, for a file is where a folder is needed.*move it away"
    ):
        target.committer().check()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")
def test_a_folder_that_can_never_be_made_is_an_error(make_target) -> None:
    """The check says so at once on a file system that makes no names but its own."""
    target = make_target()
    target.sink = type(target.sink)("/proc/totals", format="jsonl")
    with pytest.raises(StoreError, match=r"/proc/totals.* cannot be made, .* create folders: correct the path"):
        target.committer().check()


def test_a_link_to_a_folder_is_a_folder(target, totals) -> None:
    (target.folder.parent / "disk").mkdir()
    target.folder.symlink_to("disk")
    assert target.led().commit([target.staged(1, totals(1))], 1, ORIGIN)
    assert target.cents() == [1]


def as_nobody(function: Callable[[], object]) -> str:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.setuid(NOBODY)
        try:
            function()
            text = "no error"
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as pipe:
        return pipe.read().decode()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user without rights")
def test_a_right_that_is_missing_is_named(make_target, totals, request) -> None:
    place = Path(mkdtemp())  # pytest's own folders are closed to others whenever it starts anywhere
    request.addfinalizer(lambda: rmtree(place))
    place.chmod(0o755)
    target = make_target(place=place)
    target.folder.mkdir()
    told = f"StoreError: The folder file://{target.folder}: there is no right to write {target.folder}"
    assert as_nobody(target.committer().check).startswith(told)
    committer = target.led()
    committable = target.staged(1, totals(1))
    assert as_nobody(lambda: committer.commit([committable], 1, ORIGIN)).startswith(told)
    assert f"Give user {NOBODY} the right to write in {target.folder}" in as_nobody(target.committer().check)
    assert committer.commit([committable], 1, ORIGIN)


def test_a_full_disk_is_waited_for_by_the_commit(small_disk, make_target, totals) -> None:
    target = make_target(partition_by=("customer",))
    target.folder.symlink_to(small_disk)
    committer = target.led()
    committable = target.staged(1, totals(1))
    _fill(small_disk)
    with pytest.raises(StoreUnavailable, match=rf"The folder file://{target.folder} is full: make room there"):
        committer.commit([committable], 1, ORIGIN)
    (small_disk / "ballast").unlink()
    assert committer.commit([committable], 1, ORIGIN)
    assert target.lines() == [{"cents": 1}]


@pytest.mark.parametrize("exists", [False, True])
def test_a_read_only_disk_is_an_error_of_the_start(small_disk, make_target, totals, exists: bool) -> None:
    """A disk that becomes read-only later is waited for."""
    target = make_target()
    place = small_disk / "totals"
    target.folder.symlink_to(place)
    if exists:
        place.mkdir()
        committer = target.led()
        committable = target.staged(1, totals(1))
    libc: Any = ctypes.CDLL(None, use_errno=True)
    assert libc.mount(None, os.fsencode(small_disk), None, _READ_ONLY_NOW, None) == 0
    checked = target if exists else make_target()
    checked.sink = type(checked.sink)(place, format="jsonl")
    with pytest.raises(StoreError, match=r"is read-only: mount it so that it can be written, or correct the path"):
        checked.committer().check()
    if exists:
        with pytest.raises(StoreUnavailable, match="is read-only: mount it"):
            committer.commit([committable], 1, ORIGIN)


def _fill(place: Path) -> None:
    with open(place / "ballast", "wb", buffering=0) as file:
        try:
            while file.write(b"x" * 4096):
                pass
        except OSError:
            return


def test_a_full_disk_fails_the_sink(small_disk, make_target, totals, stage) -> None:
    target = make_target()
    target.folder.symlink_to(small_disk)
    committer = target.led()
    opened = target.open()
    with pytest.raises(SinkFailed, match=r"sink 'out' cannot write files: The folder .* is full.* Nothing is lost"):
        stage(opened, 1, totals(*range(40_000)))
    committer.clean(1, 2)
    assert committer.commit([target.staged(1, totals(1), attempt=2)], 1, ORIGIN)
    assert target.cents() == [1]


def test_partitions_on_another_disk_are_an_error(small_disk, make_target, totals) -> None:
    target = make_target(partition_by=("customer",))
    committer = target.led()
    committable = target.staged(1, totals(1))
    (target.folder / "customer=ann").symlink_to(small_disk)
    with pytest.raises(StoreError, match=r"is on another file system than .*: all of the folder has to be on one"):
        committer.commit([committable], 1, ORIGIN)
