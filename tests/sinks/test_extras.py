"""A sink whose library is missing can be described; what is to be written by it says what to install."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import sys
from typing import NamedTuple
from exactlyonce.sinks import FileSink, MySQLSink, PostgresSink, RedisSink
from exactlyonce.sinks.committer import CommitterContext
assert {library!r} not in sys.modules
sys.modules[{library!r}] = None
class Row(NamedTuple):
    a: int
sink = {sink}
assert list(sink.problems(Row)) == [] and sink.describe(Row)
try:
    sink.open_committer(CommitterContext(pipeline="p", sink="s", type=Row, blocks=None))
except Exception as error:
    print(f"{{type(error).__name__}}: {{error}}")
"""


@pytest.mark.parametrize(
    ("sink", "library", "said"),
    [
        ("PostgresSink('t', dsn='env:X')", "psycopg", "PostgresSink('t') needs psycopg, * 'exactlyonce[postgres]'"),
        (
            "PostgresSink('t', dsn='env:X', commit='prepared')",
            "psycopg",
            "PostgresSink('t') needs psycopg, * 'exactlyonce[postgres]'",
        ),
        ("MySQLSink('t', dsn='env:X')", "pymysql", "MySQLSink('t') needs PyMySQL, * 'exactlyonce[mysql]'"),
        ("MySQLSink('t', dsn='env:X', commit='xa')", "pymysql", "MySQLSink('t') needs PyMySQL, * 'exactlyonce[mysql]'"),
        ("RedisSink('env:X', key=str)", "redis", "RedisSink needs the redis library, * 'exactlyonce[redis]'"),
        ("FileSink('/t')", "pyarrow", "FileSink('/t', format='parquet') needs pyarrow, * 'exactlyonce[files]'"),
        ("FileSink('/t', format='jsonl')", "pyarrow", ""),
    ],
    ids=["postgres", "postgres-prepared", "mysql", "mysql-xa", "redis", "parquet", "jsonl"],
)
def test_a_missing_library_is_named(sink: str, library: str, said: str) -> None:
    """With the reason and the command that installs it; to import and to describe a sink nobody needs it."""
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(sink=sink, library=library)], capture_output=True, text=True
    )
    assert done.stderr == ""
    start, _, end = said.partition("*")
    reason = f"which cannot be imported (import of {library} halted; None in sys.modules). Run: pip install"
    assert done.stdout == (f"ConfigError: {start}{reason}{end}\n" if said else "")
