"""The documentation is true: its code runs, its settings exist, its commands parse, its tables agree with the code."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import re
import shlex
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from exactlyonce import Pipeline
from exactlyonce.cli.main import parser
from exactlyonce.engines.configuration import options_from, read_file
from exactlyonce.pipeline.graph import Kind, LogicalGraph, Node
from exactlyonce.testing.cluster import KafkaCluster

ROOT = Path(__file__).parents[1]
FOLDERS = (".", "docs", "docs/design", "docs/sinks", "docs/sources", "docs/tasks", "examples", "tests", "benchmarks")
PAGES = sorted(path.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).glob("*.md"))
PIPELINES, EVENT_TIME, JOINS, ENRICH, BATCHES = (
    Path(f"docs/{name}.md") for name in ("pipelines", "event-time", "joins", "enrich", "map-batches")
)


class Fence(NamedTuple):
    """A fenced block: what stands behind the backticks, what is in it, and the lines where it begins and ends."""

    kind: str
    text: str
    first: int
    last: int


def fences(page: Path) -> list[Fence]:
    text = (ROOT / page).read_text()
    return [
        Fence(match[1], match[2], text[: match.start()].count("\n") + 1, text[: match.end()].count("\n") + 1)
        for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    ]


def blocks(kind: str) -> list[Any]:
    return [pytest.param(page, f, id=f"{page}:{f.first}") for page in PAGES for f in fences(page) if f.kind == kind]


def executed(page: Path, fence: Fence) -> tuple[dict[str, Any], str]:
    """The names that a block defines, given those of the page's first block, and what it printed."""
    names: dict[str, Any] = {"__name__": "page"}
    first = next(each for each in fences(page) if each.kind == "python")
    for block in (first, fence):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(block.text, "pipeline.py", "exec", dont_inherit=True), names)
    return names, printed.getvalue()


def result_of(page: Path, fence: Fence) -> str | None:
    """The text block right behind a block: what comes out of it; a sentence may stand between."""
    behind = next((each for each in fences(page) if each.first > fence.last), None)
    near = behind is not None and behind.kind == "text" and behind.first - fence.last <= 4
    return behind.text if near and behind else None


@pytest.mark.parametrize(("page", "fence"), blocks("python"))
def test_code_runs_and_its_pipelines_can_be_built(page: Path, fence: Fence) -> None:
    names, printed = executed(page, fence)
    for name, test in names.items():
        if f"def {name}() -> None:" in fence.text and name.startswith("test_"):
            test()
    if printed:
        assert printed == result_of(page, fence)
    else:
        assert [built.pipeline_id for built in graphs(names, fence)] or "Pipeline(" not in fence.text


def graphs(names: dict[str, Any], fence: Fence) -> Iterator[LogicalGraph]:
    """The graph of every pipeline of a block, also of what its functions make."""
    for value in names.values():
        if isinstance(value, Pipeline):
            yield value.build()
        elif inspect.isfunction(value) and value.__annotations__.get("return") is Pipeline:
            given = [each for each in inspect.signature(value).parameters.values() if each.default is each.empty]
            yield value(*(f"the-{each.name}" for each in given)).build()


@pytest.mark.parametrize(("page", "fence"), blocks("toml"))
def test_settings_files_are_right(page: Path, fence: Fence, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXACTLYONCE_BOOTSTRAP_SERVERS", "127.0.0.1:9092")
    path = tmp_path / "settings.toml"
    path.write_text(fence.text)
    assert read_file(path)
    options_from({"config": str(path)})


def test_keyword_arguments_of_run_exist() -> None:
    for fence in chain.from_iterable(map(fences, PAGES)):
        for call in re.findall(r"\.run\((.*)\)", fence.text if fence.kind == "python" else ""):
            given = eval(f"dict({call})")
            options_from({name: value for name, value in given.items() if name not in ("log_level", "on_event")})


def commands(page: Path) -> Iterator[str]:
    for fence in fences(page):
        if fence.kind == "sh":
            joined = fence.text.replace("\\\n", " ")
            yield from re.findall(r"^(?:\w+=\S+ )*(exactlyonce .*?)(?:\s+#.*)?$", joined, re.MULTILINE)
        elif fence.kind == "console":
            yield from re.findall(r"^\$ (exactlyonce .*?)(?:\s(?:[&|>]|2>).*)?$", fence.text, re.MULTILINE)
    prose = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    yield from (code for code in re.findall(r"`(exactlyonce\s[^`|]*\s[^`|]*)`", prose))


def test_command_lines_parse() -> None:
    assert [(page, line) for page in PAGES for line in commands(page) if not parses(line)] == []


def parses(line: str) -> bool:
    try:
        parser().parse_args(shlex.split(line)[1:])
    except SystemExit as end:
        return not end.code
    return True


def test_targets_of_make_exist() -> None:
    targets = {*re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)}
    for page in PAGES:
        named = re.findall(r"^make ([\w-]+)|`make ([\w-]+)`", (ROOT / page).read_text(), re.MULTILINE)
        assert {*map("".join, named)} <= targets, page


# --- what pipelines write ---------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "topics", "least"),
    [
        (PIPELINES, {"orders": "customer"}, 10), (EVENT_TIME, {"visits": "page"}, 3),
        (JOINS, {"payments": "currency", "rates": "currency", "orders": "id", "customers": "id"}, 3),
        (ENRICH, {"orders": "item"}, 0), (BATCHES, {"payments": "id"}, 1),
    ],
)  # fmt: skip
def test_pipelines_write_what_the_page_says(
    own_broker: Callable[..., KafkaCluster], page: Path, topics: dict[str, str], least: int,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    documented = [fence.text.splitlines() for fence in fences(page) if fence.kind == "json"]
    kafka = own_broker()
    for (topic, key), records in zip(topics.items(), documented, strict=False):
        kafka.create_topic(topic)
        kafka.produce(topic, [(str(json.loads(record)[key]), record) for record in records])
    kafka.create_topic("refunds")
    kafka.produce("refunds", ['{"order": 4}'])
    compared = 0
    for fence in fences(page):
        if fence.kind != "python" or "Pipeline(" not in fence.text or "GraphError" in fence.text:
            continue
        expected, names = result_of(page, fence), executed(page, fence)[0]
        if expected is not None:
            assert written(kafka, names["pipeline"], capfd) == expected, f"{page}:{fence.first}"
            compared += 1
    assert compared > least


def written(kafka: KafkaCluster, pipeline: Pipeline, capfd: pytest.CaptureFixture[str]) -> str:
    """The output of a run of the pipeline: topic and value by line, or what it prints.

    Records of a topic from several sources have no order; it is sorted.
    """
    graph = pipeline.build()
    sinks = {node.sink.topic: node for node in graph.nodes if node.kind is Kind.SINK and node.sink and node.sink.topic}
    for topic in sinks:
        kafka.create_topic(topic)
    capfd.readouterr()
    pipeline.run(
        inline=True, until="latest", drain=True, bootstrap_servers=kafka.bootstrap_servers, checkpoint_interval="100ms"
    )
    printed = capfd.readouterr().out
    for topic, sink in sinks.items():
        lines = [f"{topic}  {shown(each.value)}\n" for each in kafka.read_committed(topic)]
        printed += "".join(lines if len(sources(graph, sink)) == 1 else sorted(lines))
    return printed


def sources(graph: LogicalGraph, node: Node) -> set[str]:
    return {each.id for each in (*graph.sources, *graph.loops) if each.id in graph.above(node.id)}


def shown(value: bytes | None) -> str:
    """A value as the page has it: null, text, or bytes with those that are no text escaped."""
    return "null" if value is None else repr(value)[2:-1]
