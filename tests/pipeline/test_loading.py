"""Loading a pipeline by its name, and running it from a script or a prompt."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from unittest.mock import patch

import msgspec
import pytest

from exactlyonce import Pipeline
from exactlyonce.connectors import KafkaSource
from exactlyonce.errors import ConfigError, GraphError
from exactlyonce.pipeline.loading import load, load_reference
from exactlyonce.pipeline.running import run
from exactlyonce.sinks import PrintSink

PIPELINE = """
from exactlyonce import Pipeline
from exactlyonce.connectors import KafkaSource
from exactlyonce.sinks import PrintSink

def make(topic: str, days: float = 1.5, loud: bool = False, *, tries: "int | None" = None) -> Pipeline:
    pipeline = Pipeline(f"{topic}-{days:g}-{loud}-{tries}".replace(".", "_"))
    pipeline.source("in", KafkaSource(topic, value=bytes)).sink("out", PrintSink())
    return pipeline

pipeline = make("orders")
number = 5

def make_nothing():
    return None

def unannotated():
    return Pipeline("p")

def fail():
    return {}["missing"]
"""

ENGINE = """
import json

def run(loaded, **options):
    from exactlyonce.pipeline.loading import load_reference
    same = load_reference(loaded.reference).build().fingerprint() == loaded.pipeline.build().fingerprint()
    print(json.dumps([loaded.reference, same, options]))
    return 7
"""

Write = Callable[[str], str]
numbers = count()


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a module into an empty working directory; returns its name, which no other test uses."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())

    def write(text: str) -> str:
        name = f"module_{next(numbers)}"
        (tmp_path / f"{name}.py").write_text(text)
        return name

    return write


def test_a_pipeline_is_loaded_and_its_reference_gives_the_same(module: Write) -> None:
    loaded = load(f"{module(PIPELINE)}:pipeline")
    reference = msgspec.json.decode(msgspec.json.encode(loaded.reference))
    assert loaded.pipeline.name == "orders-1_5-False-None"
    assert load_reference(reference) is loaded.pipeline


@pytest.mark.parametrize("name", ["elsewhere", "elsewhere_in.orders"])
def test_a_module_that_only_this_process_finds_is_found_by_others(name: str, module: Write, tmp_path: Path) -> None:
    """As in an executor, whose path lacks the folder of the driver's script."""
    folder = tmp_path / "elsewhere"
    file = folder.joinpath(*name.split(".")).with_suffix(".py")
    file.parent.mkdir(parents=True)
    file.write_text(PIPELINE)
    sys.path.insert(0, str(folder))
    assert load(f"{module(PIPELINE)}:pipeline").reference["path"] == str(tmp_path)
    reference = load(f"{name}:pipeline").reference
    program = f"from exactlyonce.pipeline.loading import load_reference; print(load_reference({reference!r}).name)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd="/", check=True)
    assert done.stdout.strip() == "orders-1_5-False-None"


def test_parameters_are_converted_to_the_annotated_types(module: Write) -> None:
    loaded = load(f"{module(PIPELINE)}:make", {"topic": "7", "days": "2", "loud": "true", "tries": "3"})
    assert loaded.pipeline.name == "7-2-True-3"
    assert load_reference(loaded.reference).build().fingerprint() == loaded.pipeline.build().fingerprint()


@pytest.mark.parametrize(
    ("target", "params", "problem"),
    [
        ("{}", {}, "names no pipeline: write module:attribute"),
        ("{}:", {}, "names no pipeline"),
        (":pipeline", {}, "names no pipeline"),
        ("{}.py:pipeline", {}, r"is a file: name it as a module, module_\d+:pipeline"),
        ("./sub/flow.py:pipeline", {}, "name it as a module, sub.flow:pipeline"),
        ("__main__:pipeline", {}, "cannot import __main__"),
        ("absent:pipeline", {}, "there is no module 'absent' in "),
        ("{}.sub:pipeline", {}, "there is no module"),
        ("{}:absent", {}, "has no 'absent'; its pipelines, and functions that return one: .*pipeline"),
        ("{}:absent", {}, "functions that may return one, though they do not say `-> Pipeline`: unannotated$"),
        ("{}:make_nothin", {}, r"\(did you mean 'make_nothing'\?\).*`: make_nothing, unannotated$"),
        ("{}:number", {}, "is neither a pipeline nor a function that returns one, but 5"),
        ("{}:pipeline", {"topic": "a"}, "is a pipeline and takes no parameters"),
        ("{}:make", {}, "needs parameter topic; it takes: topic: str, days: float = 1.5"),
        ("{}:make", {"topic": "a", "day": "1"}, "has no parameter day; it takes: topic: str"),
        ("{}:make", {"topic": "a", "days": "x"}, "the value of parameter days is not float$"),
        ("{}:make_nothing", {}, "must return a Pipeline, and returned None"),
        ("{}:fail", {}, r"module_\d+.py:\d+: .*:fail\(\) failed: KeyError: 'missing'"),
    ],
)
def test_what_cannot_be_loaded(module: Write, target: str, params: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load(target.format(module(PIPELINE)), params)


SPARK_WORK = PIPELINE + "from exactlyonce.spark import backfill\nbackfill(None, pipeline)"
SPARK_SESSION = "from pyspark.sql import SparkSession\nSparkSession.builder.remote('nowhere').create()"


@pytest.mark.parametrize(
    ("text", "error", "problem"),
    [
        ("import nowhere_to_be_found", ConfigError, "imports 'nowhere_to_be_found', which is not installed"),
        ("x = 1\ny = z", ConfigError, r"module_\d+.py:2: importing .* failed: NameError: name 'z'"),
        ("import exactlyonce as eo\neo.Hoping", ConfigError, r"module_\d+.py:2: .*AttributeError: .* mean Hopping\?"),
        ("def (", ConfigError, "SyntaxError: invalid syntax"),
        ("raise SystemExit(3)", ConfigError, "SystemExit: 3"),
        ("from exactlyonce import JsonCodec\nJsonCodec(complex)", GraphError, r"module_\d+.py:2: complex cannot"),
        (PIPELINE + "pipeline.run()", ConfigError, "runs a pipeline while it is imported: put the call under if "),
        (SPARK_WORK, ConfigError, "runs a pipeline while it is imported: put the call under if "),
        pytest.param(
            SPARK_SESSION,
            ConfigError,
            r"module_\d+.py:2: importing .* failed: PySpark\w+: \[\w+_URL",
            marks=[pytest.mark.spark, pytest.mark.exhaustive],
        ),
    ],
    ids=["missing", "name", "misspelt", "syntax", "exit", "codec", "run", "spark-work", "spark-session"],
)
def test_a_module_that_does_not_import(module: Write, text: str, error: type[Exception], problem: str) -> None:
    with patch.dict(os.environ), pytest.raises(error, match=problem):  # PySpark leaves a variable behind
        load(f"{module(text)}:pipeline")


def simple() -> Pipeline:
    pipeline = Pipeline("simple")
    pipeline.source("in", KafkaSource("in", value=bytes)).sink("out", PrintSink())
    return pipeline


of_this_module = simple()


class Engine:
    """An installed engine, as an entry point: its module is found on the path."""

    def __init__(self, folder: Path) -> None:
        (folder / "some_engine.py").write_text(ENGINE)
        info = folder / "some_engine-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-engine\nVersion: 1\n")
        (info / "entry_points.txt").write_text("[exactlyonce.engines]\nsome = some_engine:run\n")
        self.folder = folder

    def python(self, *arguments: str, cwd: Path | None = None) -> str:
        command = [sys.executable, *arguments]
        done = subprocess.run(
            command, cwd=cwd or self.folder, env={"PYTHONPATH": str(self.folder)}, capture_output=True, text=True
        )
        return done.stdout.strip() or done.stderr


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(tmp_path)


SCRIPT = PIPELINE + 'if __name__ == "__main__":\n    assert pipeline.run("some", parallelism=2) == 7\n'


@pytest.mark.exhaustive(but=["elsewhere", "package"])
@pytest.mark.parametrize(
    ("files", "arguments", "found"),
    [
        pytest.param({"script.py": SCRIPT}, ["{}/script.py"], "script:pipeline", id="elsewhere"),
        pytest.param({"flows/orders.py": SCRIPT}, ["-m", "flows.orders"], "flows.orders:pipeline", id="package"),
        pytest.param(
            {
                "made.py": PIPELINE,
                "named.py": 'from made import make\nbound = make("orders")\n',
                "runs.py": "import named\nnamed.bound.run('some', parallelism=2)\n",
            },
            ["runs.py"], "named:bound", id="imported",
        ),
    ],
)  # fmt: skip
def test_what_is_run_is_imported_again(engine: Engine, files: dict[str, str], arguments: list[str], found: str) -> None:
    for name, text in files.items():
        (engine.folder / name).parent.mkdir(exist_ok=True)
        (engine.folder / name).write_text(text)
    elsewhere = Path("/") if "{}" in arguments[0] else None
    printed = engine.python(*(each.format(engine.folder) for each in arguments), cwd=elsewhere)
    module, _, attribute = found.partition(":")
    reference = {"module": module, "attribute": attribute, "params": {}, "path": str(engine.folder)}
    assert msgspec.json.decode(printed) == [reference, True, {"parallelism": 2}]


def test_a_prompt_may_run_inline(engine: Engine) -> None:
    printed = engine.python("-c", PIPELINE + "pipeline.run('some', inline=True)")
    assert msgspec.json.decode(printed)[1:] == [True, {"inline": True}]


def test_a_program_may_name_the_pipeline(engine: Engine) -> None:
    (engine.folder / "orders.py").write_text(PIPELINE)
    printed = engine.python("-c", "import exactlyonce\nexactlyonce.run('orders:pipeline', 'some', parallelism=2)")
    reference = {"module": "orders", "attribute": "pipeline", "params": {}, "path": str(engine.folder)}
    assert msgspec.json.decode(printed) == [reference, True, {"parallelism": 2}]
    printed = engine.python("-c", "import exactlyonce\nexactlyonce.run(7, 'some')")
    assert "7 is no pipeline: give one, or its name as 'module:attribute'" in printed


@pytest.mark.exhaustive(but=["changing"])
@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        pytest.param("", f"{PIPELINE}pipeline.run('some')", "run(inline=True) runs everything in this", id="typed"),
        pytest.param("my-script.py", SCRIPT, "cannot import a file named my-script.py: rename it", id="nameless"),
        pytest.param(
            "script.py", SCRIPT.replace("pipeline.run", "make('x').run"), "no global variable of a module holds it",
            id="unbound",
        ),
        pytest.param(
            "script.py", SCRIPT.replace('make("orders")', 'make(__name__.strip("_"))'), "gives another graph",
            id="changing",
        ),
        pytest.param(
            "script.py", SCRIPT.replace('"some"', '"none"'), "there is no engine 'none'; installed: ", id="engine"
        ),
    ],
)  # fmt: skip
def test_what_cannot_run_is_told(engine: Engine, name: str, text: str, problem: str) -> None:
    if name:
        (engine.folder / name).write_text(text)
    assert problem in engine.python(*([name] if name else ["-c", text]))


def test_a_pipeline_of_another_process_is_refused() -> None:
    with pytest.raises(ConfigError, match="another process"):
        load_reference({"here": 1})


def test_run_hands_over_to_the_engine(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(engine.folder))
    result: object = run(of_this_module, "some", inline=True)
    assert result == 7
