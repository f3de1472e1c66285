"""Help, messages and exit codes of the real command."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
from importlib.metadata import version
from itertools import chain

import pytest
from generate import COMMAND_LINE, command_line, commands

from exactlyonce.cli.commands import explain
from exactlyonce.cli.main import main, parser
from tests.cli.conftest import Command

CANARY = "canary-5f2e"


def examples(command: argparse.ArgumentParser) -> list[str]:
    """The lines of the help that are commands of *command*, each with its continuation."""
    text = (command.description or "").partition("examples:\n")[2].replace("\\\n", " ")
    return re.findall(rf"^  .*?({command.prog}(?: .*)?)$", text, re.MULTILINE)


def test_version(command: Command) -> None:
    assert command("--version") == (0, f"exactlyonce {version('exactlyonce-kafka')}\n", "")


def test_help_is_the_documented_one(command: Command) -> None:
    """The help that a process prints, and that the site shows; it has that of every command."""
    ended = command("savepoints", "list", "--help", COLUMNS="100")
    assert (ended.code, ended.err) == (0, "")
    page = command_line(COMMAND_LINE.read_text())
    assert f"```text\n$ exactlyonce savepoints list --help\n{ended.out}```\n" in page
    assert (
        max(len(line) for block in re.findall(r"--help\n(.*?)```", page, re.DOTALL) for line in block.splitlines())
        <= 100
    )


EXAMPLES = [
    pytest.param(line, id=f"{words}-{number}")
    for words, command in commands(parser())
    for number, line in enumerate(examples(command))
]


@pytest.mark.parametrize("line", EXAMPLES)
def test_the_examples_of_the_help_are_commands(line: str) -> None:
    """Each is accepted as it is written; comments beside it begin after two spaces, and pipes are the shell's."""
    parser().parse_args(shlex.split(re.split(r" [|<>]| {3}|\)", line)[0])[1:])


def test_every_command_has_an_example_and_a_task() -> None:
    """The example of a command with actions is one of an action."""
    root = parser()
    assert [words for words, command in commands(root) if words and not any(examples(command))] == []
    (action,) = (action for action in root._actions if isinstance(action.choices, dict))
    assert sorted(chain(*vars(action)["by_task"].values())) == sorted(action.choices or ())


def test_help_loads_no_client(command: Command) -> None:
    """Neither that of all commands, nor that of one, which loads no other command."""
    code = "import sys, exactlyonce.cli.main as m; m.parser({}).format_help(); print(*sys.modules, sep='\\n')"
    for word, own in (None, None), ("--help", set()), ("explain", {"exactlyonce.cli.commands.explain"}):
        line = [command.line[0], "-c", code.format(repr(word))]
        done = subprocess.run(line, capture_output=True, text=True, check=True)
        modules = set(done.stdout.split())
        assert not {"confluent_kafka", "kafka", "pyspark", "exactlyonce.engines.local.run"} & modules
        if own is not None:
            assert {name for name in modules if name.startswith("exactlyonce.cli.commands.")} == own


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "the following arguments are required: COMMAND"),
        (("rnu",), "error: argument COMMAND: invalid choice: 'rnu'. Did you mean run?\n"),
        (("status",), "invalid choice: 'status'. Did you mean top?\n"),
        (("savepoints", "lst"), "invalid choice: 'lst'. Did you mean list?\n"),
        (("dump",), "invalid choice: 'dump' (choose from demo, init, "),
        (("state", "show", "a", "--operator", "x"), "--operator. Did you mean OPERATOR, written without --operator?\n"),
        (("dead-letters", "list", "t", "--op", "x"), "unrecognized arguments: --op. Did you mean --operator?\n"),
        (("run", "a:b", "--workers", "2"), "unrecognized arguments: --workers. Did you mean --parallelism?\n"),
        (("backfill", "a:b", "--until", "latest"), "unrecognized arguments: --until. Did you mean --to?\n"),
        (("run",), "the following arguments are required: MODULE:PIPELINE"),
        (("run", "a:b", "--until", "never"), "argument --until: until is 'never'. Write one of: running, latest."),
        (("run", "a:b", "--parallelism", "two"), "argument --parallelism: parallelism is 'two': write a whole number."),
        (("run", "a:b", "--parallelism", "0"), "argument --parallelism: parallelism is 0: it must be at least 1."),
        (("run", "a:b", "--checkpoint-interval", "5"), "argument --checkpoint-interval: checkpoint_interval ("),
        (("run", "a:b", "--checkpoint-storage", "x"), "(--checkpoint-storage): it is neither"),
        (("run", "a:b", "--restart", "fixed_delay:3"), "argument --restart: 'fixed_delay:3': write it as"),
        (("run", "a:b", "--check"), "unrecognized arguments: --check"),
        (("checkpoints", "a", "--params", "x"), "unrecognized arguments: --params. Did you mean --param?\n"),
        (("run", "a:b", "--paralelism", "2"), "usage: exactlyonce run MODULE:PIPELINE [options]\n"),
        (("run", "a:b", "--paralelism", "2"), "run: error: unrecognized arguments: --paralelism. Did you mean --para"),
        (("savepoints", "list", "a", "--jsno"), "list: error: unrecognized arguments: --jsno. Did you mean --json?\n"),
        (("--params=x", "checkpoints", "a"), "unrecognized arguments: --params: options go after the command"),
        (("doctor", "a", "x"), "unrecognized arguments: words without an option before them (a value with"),
        (("config", "show", "a:b"), "It takes no pipeline: all have the same settings\n"),
        (("checkpoints", "a", "--limit", "2"), "unrecognized arguments: --limit. Did you mean --last?\n"),
        (("broker", "start", "--port", "99999"), "'99999' is not a port: write a number from 0 to 65535"),
    ],
)
def test_wrong_usage(command: Command, arguments: tuple[str, ...], message: str) -> None:
    ended = command(*arguments)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("usage: exactlyonce ")
    assert message in ended.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("checkpoints", "a", "--password", CANARY),
        ("checkpoints", "a", f"--password={CANARY}"),
        ("checkpoints", "a", f"--password:{CANARY}"),
        ("checkpoints", "a", f"-p{CANARY}"),
        ("checkpoints", "a", "--kafka", "sasl.password=", CANARY),
        ("checkpoints", "a", "--kafka", CANARY),
        ("--password", CANARY, "checkpoints", "a"),
        ("--kafka", f"sasl.password={CANARY}", "checkpoints", "a"),
        ("explain", "m:make", "--param", f"region={CANARY}"),
    ],
    ids=" ".join,
)
def test_a_word_that_nobody_takes_is_not_repeated(command: Command, arguments: tuple[str, ...]) -> None:
    """It may be the value of an option that was written wrongly, which may be a secret."""
    (command.folder / "m.py").write_text("def make(region: int) -> None: ...\n")
    ended = command(*arguments)
    assert (ended.code, ended.out) == (2, "")
    assert CANARY not in ended.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("explain", "nowhere:p"), "there is no module 'nowhere' in "),
        (("explain", "m:other"), "'m' has no 'other'; its pipelines, and functions that return one: empty, make"),
        (("explain", "m:mak"), "module 'm' has no 'mak' (did you mean 'make'?); its pipelines, and "),
        (("explain", "m:empty"), "pipeline 'empty' cannot be built:\n  m.py:"),
        (("explain", "m:make"), "m:make needs parameter region; it takes: region: str"),
        (("run", "m:empty"), "No Kafka cluster is named. Give --bootstrap-servers"),
        (("checkpoints", "no name", "--bootstrap-servers", "h:1"), "The pipeline name 'no name' must be"),
        (("run", "m:empty", "--config", "x.toml"), "The configuration file x.toml cannot be read: No such file"),
        (("run", "m:empty", "--bootstrap-servers", "h:1", "--restart", "once"), "no restart strategy 'once'"),
        (("run", "m:empty", "--bootstrap-servers", "h:1", "--restart", "none:tries=1"), "has no option 'tries'"),
        (("run", "m:empty", "--bootstrap-servers", "h:1", "--kafka", "linger=1"), 'configuration property: "linger"'),
        (("run", "m:empty", "--bootstrap-servers", "h:1", "--state-memory", "1gb"), "Set state_backend ("),
        (("run", "m:empty", "--bootstrap-servers", "h:1", "--from-savepoint", "x"), "(--from-savepoint): it is"),
        (("savepoint", "a", "--bootstrap-servers", "h:1", "--to", "topic"), "to: it is neither"),
        (("savepoints", "verify", "a", "x"), "N|URL: it is neither"),
        (("savepoints", "delete", "a", "gs://x"), "N|URL: there is no storage gs://. Write /folder"),
        (("checkpoints", "a", "--bootstrap-servers", "h:1", "--kafka", "linger=1"), "No such configuration property"),
        (("checkpoints", "a", "--bootstrap-servers", "h:1", "--kafka", "linger_ms=1"), "dots: write linger.ms."),
        (("reset", "a"), "No Kafka cluster is named."),
        (("init", "m.py"), "m.py cannot be created: File exists. Name another folder."),
    ],
)
def test_errors_that_a_user_can_fix(command: Command, arguments: tuple[str, ...], message: str) -> None:
    (command.folder / "m.py").write_text(
        "from exactlyonce import Pipeline\n"
        'empty = Pipeline("empty")\n'
        'def make(region: str) -> Pipeline: return Pipeline(f"orders-{region}")\n'
    )
    ended = command(*arguments)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("exactlyonce: ")
    assert message in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "m:wrong"),
        ("run", "m:wrong", "--verbose"),
        ("backfill", "m:wrong"),
        ("catch-up", "m:wrong"),
        ("audit", "m:wrong"),
        ("checkpoints", "m:wrong"),
    ],
    ids=" ".join,
)
def test_errors_in_json(command: Command, arguments: tuple[str, ...]) -> None:
    """An error with --json is one line of JSON on stderr, and nothing else is there, whatever the command."""
    (command.folder / "m.py").write_text("from exactlyonce import Pipeline\ndef wrong() -> Pipeline: return 1\n")
    given = arguments if "--verbose" in arguments else (*arguments, "--json")
    ended = command(*given, "--bootstrap-servers", "h:1")
    assert (ended.code, ended.out) == (2, "")
    (event,) = map(json.loads, ended.err.splitlines())
    assert (event["event"], event["code"], event["error"]) == ("failed", 2, "ConfigError")
    assert event["pipeline"] is None
    assert "must return a Pipeline" in event["text"]


def test_a_traceback_in_json(command: Command) -> None:
    ended = command("checkpoints", "m:p", "--json", "--bootstrap-servers", "h:1", EXACTLYONCE_DEBUG="1")
    (event,) = map(json.loads, ended.err.splitlines())
    assert event["traceback"].startswith("Traceback (most recent call last):\n")


def test_traceback_on_demand(command: Command) -> None:
    ended = command("explain", "nowhere:p", EXACTLYONCE_DEBUG="1")
    assert ended.err.startswith("Traceback (most recent call last):\n")
    assert ended.err.splitlines()[-1].startswith("exactlyonce: there is no module 'nowhere'")


def test_defect(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(explain, "loaded", lambda args: {"something": 0}["nothing"])
    assert main(["explain", "m:p"]) == 70
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first == "Traceback (most recent call last):"
    assert last == "exactlyonce: KeyError: 'nothing'. This is a defect of exactlyonce: please report it"


def test_interrupt_before_the_start(command: Command) -> None:
    """Ctrl-C while the pipeline is being imported ends quietly, with the code that shells use."""
    (command.folder / "m.py").write_text(
        "import os, signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background job ignores it
        "os.kill(os.getpid(), signal.SIGINT)\n"
    )
    assert command.process("explain", "m:p") == (130, "", "")


PIPELINE = """\
from exactlyonce import Pipeline
from exactlyonce.connectors import KafkaSource
from exactlyonce.sinks import PrintSink
p = Pipeline("p")
p.source("in", KafkaSource("t", value=bytes)).sink("out", PrintSink())
"""


def test_output_that_nobody_takes(command: Command) -> None:
    """A closed pipe, as after `| head`, ends the command without a word; a full disk is the system's refusal."""
    (command.folder / "m.py").write_text(PIPELINE)
    reading, writing = os.pipe()
    os.close(reading)
    lines = ("--help",), ("explain", "m:p")
    done = [
        subprocess.run([*command.line, *line], cwd=command.folder, stdout=writing, stderr=subprocess.PIPE)
        for line in lines
    ]
    os.close(writing)
    assert [each.stderr for each in done] == [b"", b""]
    assert {each.returncode for each in done} <= {0, 141}  # 0: argparse did not look whether its help was read
    with open("/dev/full", "w") as full:
        refused = subprocess.run([*command.line, "--version"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (refused.returncode != 0, "No space left on device" in refused.stderr) == (True, True)


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "m:p", "--kafak", f"sasl.password={CANARY}"),
        ("run", "m:p", "--kafka", CANARY),
        ("run", "m:p", "--bootstrap-servers", "h:1", "--kafka", f"sasl.password={CANARY}"),
        (
            *("run", "m:p", "--bootstrap-servers", "h:1", "--kafka", "security.protocol=SASL_SSL"),
            *("--kafka", "sasl.mechanism=PLAIN", "--kafka", "sasl.username=u", "--kafka", "sasl.password=env:KEY"),
        ),
    ],
)
@pytest.mark.parametrize("debug", ["0", "1"])
def test_secrets_stay_secret(command: Command, arguments: tuple[str, ...], debug: str) -> None:
    (command.folder / "m.py").write_text('import os\nraise RuntimeError("no entry with " + os.environ["KEY"])\n')
    ended = command(*arguments, KEY=CANARY, EXACTLYONCE_DEBUG=debug)
    assert ended.code == 2
    assert CANARY not in ended.err
