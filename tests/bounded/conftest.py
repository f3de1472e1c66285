"""Fixtures of bounded work: pipelines that units can import, and what a checkpoint says of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def loaded(topic_name: str) -> Callable[..., Any]:
    """`loaded("broad")` is that function of bounded_pipelines, made for the topics of this test."""
    from bounded import load_pipeline

    return lambda attribute, module="bounded_pipelines": load_pipeline(module, attribute, topic_name)


@pytest.fixture
def fed(kafka: Any, topic_name: str) -> Any:
    """The input topics of `broad`: 4 and 3 partitions, one of which stays empty, and what was written to them."""
    from bounded import Fed

    return Fed(kafka, topic_name)


@pytest.fixture
def said(fed: Any, capsys: Any, monkeypatch: Any, request: pytest.FixtureRequest) -> Callable[..., tuple[int, str]]:
    """`said("audit", "--json")` is the exit code of a command for the module's TARGET, and what it writes."""
    from bounded import HERE

    from exactlyonce.cli.main import main

    def run(command: str, *arguments: str) -> tuple[int, str]:
        monkeypatch.chdir(HERE)
        capsys.readouterr()
        words = ("--param", f"name={fed.name}", "--bootstrap-servers", fed.kafka.bootstrap_servers)
        code = main([command, request.module.TARGET, *words, *arguments])
        out, err = capsys.readouterr()
        return code, out or err

    return run
