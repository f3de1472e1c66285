"""A sink whose library is missing can be described; what is to be written by it says what to install."""

from __future__ import annotations

import re
import subprocess
import sys

CODE = """
import sys
from typing import NamedTuple
from exactlyonce.sinks import DeltaSink, DuckDBSink, FileSink, IcebergSink, MySQLSink, PostgresSink, RedisSink
from exactlyonce.sinks.committer import CommitterContext
libraries = {"psycopg", "pymysql", "redis", "pyarrow", "pyiceberg", "deltalake", "duckdb"}
assert not libraries & set(sys.modules)
sys.modules.update(dict.fromkeys(libraries))
class Row(NamedTuple):
    a: int
for sink in (
    PostgresSink("t", dsn="env:X"), MySQLSink("t", dsn="env:X"),
    RedisSink("env:X", key=str), FileSink("/t"),
    DeltaSink("/t"), DuckDBSink("a.duckdb", table="t"), IcebergSink("a.t", catalog={"type": "rest", "uri": "env:X"}),
    FileSink("/t", format="jsonl"),
):
    assert list(sink.problems(Row)) == [] and sink.describe(Row)
    try:
        sink.open_committer(CommitterContext(pipeline="p", sink="s", type=Row, blocks=None))
        print("nothing")
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
"""
LACKING = [
    ("PostgresSink('t') needs psycopg", "psycopg", "psycopg[binary]>="),
    ("MySQLSink('t') needs PyMySQL", "pymysql", "pymysql>="),
    ("RedisSink needs the redis library", "redis", "redis>="),
    ("FileSink('/t', format='parquet') needs pyarrow", "pyarrow", "pyarrow>="),
    ("DeltaSink('/t') needs deltalake", "pyarrow", "deltalake<2,>=1.6' 'pyarrow>="),
    ("DuckDBSink('a.duckdb') needs duckdb", "duckdb", "duckdb>=1.4' 'pyarrow>="),
    ("IcebergSink('a.t') needs pyiceberg", "pyarrow", "pyiceberg[pyarrow,pyiceberg-core,sql-sqlite]<0.13,>="),
]


def test_a_missing_library_is_named() -> None:
    requirement = re.compile(r"(?<=>=)[0-9.]+'$")
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert done.stderr == ""
    assert [requirement.sub("", line) for line in done.stdout.splitlines()] == [
        *(
            f"ConfigError: {needs}, which cannot be imported (import of {library} halted; None in sys.modules). "
            f"Run: pip install '{package}"
            for needs, library, package in LACKING
        ),
        "nothing",
    ]
