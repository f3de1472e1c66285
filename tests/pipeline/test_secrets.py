"""References to secrets: what they stand for, and what is wrong with them, said without a secret."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.secrets import look_up
from exactlyonce.pipeline.sink import Sink
from exactlyonce.sinks import MySQLSink, PostgresSink, RedisSink


class Row(msgspec.Struct):
    customer: str


def test_what_a_reference_stands_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    (tmp_path / "secret").write_text(" hunter 3\n")
    assert look_up("dsn", "env:SECRET") == "hunter2"
    assert look_up("dsn", f"file:{tmp_path / 'secret'}") == " hunter 3"
    assert look_up("dsn", "hunter4") == "hunter4"


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("env:", "dsn is env:, but it names no variable: write env:NAME."),
        ("file:", "dsn is file:, but it names no file: write file:/path."),
        ("env:MISSING", "dsn is env:MISSING, but the environment has no variable MISSING. Export it."),
        ("env:EMPTY", "dsn is env:EMPTY, but the variable EMPTY is empty. Put the secret there."),
        ("file:{0}/missing", "dsn is file:{0}/missing, which cannot be read: No such file or directory."),
        ("file:{0}/empty", "dsn is file:{0}/empty, but the file {0}/empty is empty. Put the secret there."),
    ],
    ids=["no-variable", "no-file", "missing-variable", "empty-variable", "missing-file", "empty-file"],
)
def test_a_reference_to_nothing(reference: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMPTY", " ")
    monkeypatch.delenv("MISSING", raising=False)
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError) as error:
        look_up("dsn", reference.format(tmp_path))
    assert str(error.value) == said.format(tmp_path)


@pytest.mark.parametrize("reference", ["env:LATIN", "file:{0}/latin"])
def test_what_is_no_text(reference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = b"hunter\xff2"
    monkeypatch.setenv("LATIN", os.fsdecode(secret))
    (tmp_path / "latin").write_bytes(secret)
    with pytest.raises(ConfigError, match=r"^dsn is .*, but the .* is not UTF-8\. Encode it so\.$") as error:
        look_up("dsn", reference.format(tmp_path))
    assert not any(each in str(error.value) for each in ("hunter", "ff"))


SINKS: dict[str, Callable[[str], Sink[Row]]] = {
    "postgres": lambda where: PostgresSink[Row]("t", dsn=where),
    "mysql": lambda where: MySQLSink[Row]("t", dsn=where),
    "redis": lambda where: RedisSink[Row](where, key=lambda row: row.customer),
}


@pytest.mark.parametrize("sink", SINKS)
@pytest.mark.parametrize("reference", ["env:", "file:"])
def test_a_sink_that_names_nothing_is_refused_when_it_is_built(sink: str, reference: str) -> None:
    unnamed = SINKS[sink](reference)
    (problem,) = unnamed.problems(Row)
    assert repr(reference) in problem
    assert "it names no" in problem
    assert list(SINKS[sink]("env:SOMEWHERE").problems(Row)) == []
