"""A page of docs/tasks is a session at a terminal: what it shows is what comes of it.

Its files are written, its records go into topics, and its commands run, in the order of the page. What commands print
on stdout, and what readers of committed records see, is on the page; `...` stands for what differs from run to run.
"""

from __future__ import annotations

import doctest
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster
from tests.test_docs import PAGES, ROOT, Fence, fences, shown

TASKS = [page for page in PAGES if page.parts[:2] == ("docs", "tasks")]
SESSIONS = [page for page in TASKS if any(fence.kind == "console" for fence in fences(page))]
MATCHES = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Session:
    """A shell in a folder, with the addresses of the servers that the page names."""

    def __init__(self, page: Path, folder: Path, clusters: list[KafkaCluster], dsn: str | None) -> None:
        self.lines, self.folder, self.clusters = (ROOT / page).read_text().splitlines(), folder, clusters
        self.file = folder
        servers = [cluster.bootstrap_servers for cluster in clusters]
        variables = dict(zip(("EXACTLYONCE_BOOTSTRAP_SERVERS", "NEW_SERVERS"), servers, strict=False))
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.environment = {**os.environ, **variables, "PATH": path} | ({"SHOP_DSN": dsn} if dsn else {})

    def take(self, fence: Fence) -> None:
        """A block: what its kind says. A file begins with its name in a comment."""
        match fence.kind:
            case "python" if named := re.match(r"# (\w+\.py)\n", fence.text):
                self.file = self.folder / named[1]
                self.file.write_text(fence.text)
            case "diff":
                self.change(fence)
            case "json":
                self.feed(fence)
            case "text":
                self.read(fence)
            case "console":
                for command, printed in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", fence.text, re.MULTILINE):
                    self.run(command, printed)

    def change(self, fence: Fence) -> None:
        """The newest file has the lines before the change once; then it has those after it."""
        lines = fence.text.splitlines(keepends=True)
        before, after = ("".join(line[1:] for line in lines if line[0] != other) for other in "+-")
        text = self.file.read_text()
        assert text.count(before) == 1, before
        self.file.write_text(text.replace(before, after))

    def feed(self, fence: Fence) -> None:
        """Records go into the topic that the paragraph before them names last; their key is their first field."""
        said = "\n".join(self.lines[: fence.first - 1]).rstrip().rpartition("\n\n")[2]
        topic = re.findall(r"`([\w.-]+)`", said)[-1]
        cluster = self.clusters["$NEW_SERVERS" in said]
        if topic not in cluster.topics():
            cluster.create_topic(topic)
        records = [(json.loads(line), line) for line in fence.text.splitlines()]
        cluster.produce(topic, [(str(next(iter(record.values()))), line) for record, line in records])

    def read(self, fence: Fence) -> None:
        """Topics have these values, and no others."""
        lines = fence.text.splitlines()
        topics = {line.split()[0] for line in lines}
        seen = [f"{topic}  {shown(each.value)}" for topic in topics for each in self.clusters[0].read_committed(topic)]
        assert sorted(seen) == sorted(lines)

    def run(self, command: str, printed: str) -> None:
        if exported := re.fullmatch(r"export (\w+)=\$(\w+)", command):
            self.environment[exported[1]] = self.environment[exported[2]]
            return
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        assert doctest.OutputChecker().check_output(printed, done.stdout, MATCHES), f"{command}\n{done.stdout}"


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("page", SESSIONS, ids=[page.stem for page in SESSIONS])
def test_the_session_of_a_page(
    page: Path, own_broker: Callable[..., KafkaCluster], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    text, dsn = (ROOT / page).read_text(), None
    if "$SHOP_DSN" in text:
        server: Any = request.getfixturevalue("postgres_server")
        server.execute("DROP DATABASE IF EXISTS shop")
        server.execute("CREATE DATABASE shop")
        dsn = server.dsn("shop")
    session = Session(page, tmp_path, [own_broker() for _ in range(1 + ("$NEW_SERVERS" in text))], dsn)
    for fence in fences(page):
        session.take(fence)


def test_tasks_are_short_and_first() -> None:
    """A page has one subject, in at most 500 words; the README and the site begin with all of them."""
    assert [(page, words) for page in TASKS if (words := len((ROOT / page).read_text().split())) > 500] == []
    for index in ("README.md", "docs/index.md"):
        section = (ROOT / index).read_text().partition("## I want to\n")[2].partition("\n## ")[0]
        assert {*re.findall(r"tasks/([\w-]+)\.md", section)} == {page.stem for page in TASKS}, index
