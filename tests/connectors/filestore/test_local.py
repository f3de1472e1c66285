"""A folder of this machine: names that are never replaced, and the system's errors."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from exactlyonce.connectors.filestore import local
from exactlyonce.connectors.filestore.local import LocalStore
from exactlyonce.pipeline.errors import ConfigError, StorageUnavailable


@pytest.mark.parametrize("rename", [local.rename_new, local.link_new])
@pytest.mark.parametrize("content", ["old", "new, and another"])
def test_renaming_never_overwrites(rename, tmp_path: Path, content: str) -> None:
    (tmp_path / "old").write_text("old")
    (tmp_path / "new").write_text(content)
    with pytest.raises(FileExistsError):
        rename(tmp_path / "old", tmp_path / "new")
    assert [(tmp_path / name).read_text() for name in ("old", "new")] == ["old", content]


def test_a_file_system_that_could_only_replace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused by the check, before anything is written."""

    def refuse(old: Path, new: Path) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), str(old), None, str(new))

    monkeypatch.setattr(local, "_renameat2", lambda old, new: False)
    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(ConfigError, match=r"it can neither rename without replacing nor link\. Name another"):
        LocalStore(tmp_path, "inner").check()
    assert list((tmp_path / "inner").iterdir()) == []


@pytest.mark.parametrize(
    ("code", "kind", "text"),
    [
        ("EROFS", StorageUnavailable, "read-only: mount it so that it can be written"),
        ("EIO", StorageUnavailable, "Input/output error"),
        ("EDQUOT", StorageUnavailable, "is full: make room there"),
        ("ENAMETOOLONG", ConfigError, "File name too long"),
    ],
)
def test_other_errors_of_the_system(code: str, kind: type[Exception], text: str) -> None:
    """Permanent ones are errors of the configuration; all others count as a storage that is away."""
    number = getattr(errno, code)
    with pytest.raises(kind, match=text), LocalStore(Path("/"), "data")._explained():
        raise OSError(number, os.strerror(number), "/data/x")
