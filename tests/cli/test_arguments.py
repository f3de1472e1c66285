"""The command line reaches the engine as it was written."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from exactlyonce.cli.arguments import client, named, pipeline_name
from exactlyonce.cli.commands import run
from exactlyonce.cli.main import parser
from exactlyonce.cli.spark_arguments import LineOfProgress, leading_options
from exactlyonce.engines.configuration import options_from
from exactlyonce.pipeline.errors import ConfigError
from tests.cli.conftest import manifest


def test_every_option_reaches_the_engine() -> None:
    line = (
        "run orders:make --param region=eu --param year=2013 --bootstrap-servers h:9092 --parallelism 2 --until latest "
        "--checkpoint-interval 500ms --checkpoint-timeout 2m --min-pause 10ms --max-concurrent 2 --tolerable-failed 3 "
        "--num-retained 5 --restart-budget 30s --transaction-timeout 10m --checkpoint-partitions 9 --accept-loss 12 "
        "--restart fixed_delay:attempts=3,delay=1s --kafka linger.ms=5 --kafka client.id=a=b"
    )
    args = parser().parse_args(line.split())
    options = options_from(run.settings_given(args))
    assert (args.pipeline, dict(args.param)) == ("orders:make", {"region": "eu", "year": "2013"})
    assert dict(options.client.settings) == {"bootstrap.servers": "h:9092", "linger.ms": "5", "client.id": "a=b"}
    assert (options.parallelism, options.until, options.accept_loss, options.inline) == (2, "latest", 12, False)
    assert options.restart == {"strategy": "fixed_delay", "attempts": 3, "delay_ms": 1000}
    assert options.checkpoint_partitions == 9
    checkpoint = options.checkpoint
    assert (checkpoint.interval_ms, checkpoint.timeout_ms, checkpoint.min_pause_ms) == (500, 120_000, 10)
    assert (checkpoint.max_concurrent, checkpoint.tolerable_failed, checkpoint.num_retained) == (2, 3, 5)
    assert (checkpoint.restart_budget_ms, checkpoint.transaction_timeout_ms) == (30_000, 600_000)


@pytest.mark.parametrize("command", ["backfill", "catch-up"])
def test_every_option_of_a_command_on_spark_reaches_the_engine(command: str) -> None:
    line = (
        f"{command} orders:pipeline --bootstrap-servers h:9092 --parallelism 2 --num-retained 5 "
        "--store-timeout 20m --transaction-timeout 10m --checkpoint-partitions 9 --accept-loss 12 --repair halt "
        "--kafka linger.ms=5"
    )
    options = leading_options(parser().parse_args(line.split()))
    assert dict(options.client.settings) == {"bootstrap.servers": "h:9092", "linger.ms": "5"}
    assert (options.parallelism, options.accept_loss, options.repair) == (2, 12, "halt")
    assert (options.checkpoint_partitions, options.checkpoint.num_retained) == (9, 5)
    assert (options.checkpoint.store_timeout_ms, options.checkpoint.transaction_timeout_ms) == (1_200_000, 600_000)


def test_defaults_are_the_engines() -> None:
    args = parser().parse_args(["run", "orders:pipeline", "--bootstrap-servers", "h:1"])
    assert options_from(run.settings_given(args)) == options_from({"bootstrap_servers": "h:1"})


def test_what_is_given_wins_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(
        '[run]\nparallelism = 4\nuntil = "latest"\n'
        '[kafka]\n"bootstrap.servers" = "toml:1"\n"linger.ms" = 5\n"client.id" = 1\n'
    )
    line = ["run", "o:p", "--config", str(tmp_path / "c.toml"), "--parallelism", "2", "--kafka", "linger.ms=7"]
    options = options_from(run.settings_given(parser().parse_args(line)))
    assert (options.parallelism, options.until) == (2, "latest")
    assert dict(options.client.settings) == {"bootstrap.servers": "toml:1", "linger.ms": "7", "client.id": "1"}


def test_client_of_the_other_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXACTLYONCE_BOOTSTRAP_SERVERS", "environment:1")
    (tmp_path / "c.toml").write_text('[kafka]\n"bootstrap.servers" = "toml:1"\n')
    in_file = ["--config", str(tmp_path / "c.toml")]
    cases = {"option:1": [*in_file, "--bootstrap-servers", "option:1"], "toml:1": in_file, "environment:1": []}
    for expected, line in cases.items():
        assert client(parser().parse_args(["reset", "p", *line])).bootstrap_servers == expected
    monkeypatch.delenv("EXACTLYONCE_BOOTSTRAP_SERVERS")
    with pytest.raises(ConfigError, match="No Kafka cluster is named"):
        client(parser().parse_args(["reset", "p"]))


NAMING = [["reset"], ["checkpoints"], ["transactions", "list"], ["transactions", "abort"]]


@pytest.mark.parametrize("command", NAMING, ids=" ".join)
def test_a_pipeline_is_named_by_the_function_that_makes_it(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "named.py").write_text(
        "from exactlyonce import Pipeline\n\n\ndef make(region: str) -> Pipeline:\n"
        '    return Pipeline(f"orders-{region}")\n'
    )
    monkeypatch.chdir(tmp_path)
    assert pipeline_name(parser().parse_args([*command, "named:make", "--param", "region=eu"])) == "orders-eu"
    assert pipeline_name(parser().parse_args([*command, "orders-eu"])) == "orders-eu"
    with pytest.raises(ConfigError, match="--param is for a function that returns a pipeline; orders-eu is the name"):
        pipeline_name(parser().parse_args([*command, "orders-eu", "--param", "region=eu"]))


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("region=eu", "region=eu"),
        ("region=eu west", "'region=eu west'"),
        ("minimum=10", "minimum=10"),
        ("dsn=env:ORDERS_DSN", "dsn=env:ORDERS_DSN"),
        ("dsn=postgres://u:secret@h/db", "dsn=..."),
        ("target=postgres://u:secret@h/db", "target=..."),
        ("api_token=short", "api_token=..."),
        ("DB_PASSWORD=short", "DB_PASSWORD=..."),
        ("x=0123456789abcdef0123456789abcdef", "x=..."),
    ],
)
def test_a_command_to_go_on_with(given: str, shown: str) -> None:
    """It can be pasted, but for values that may be secrets: output is kept in logs."""
    args = parser().parse_args(["backfill", "orders:make", "--param", given])
    assert named(args) == f"orders:make --param {shown}"


# --- the line of progress of a long command ---------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def advanced(records: int) -> Any:
    return SimpleNamespace(manifest=manifest(), records=records, records_out=records, elapsed_ms=0, skipped=[])


@pytest.mark.parametrize("rounds", [[(100, 110)], [(100, 110), (5_000, 5_010)]], ids=["once", "followed"])
def test_the_rate_counts_from_where_the_work_begins(
    rounds: Sequence[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the start of Spark nor the time in which there was nothing to read is a part of it."""
    terminal, now_s = Terminal(), 0
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("exactlyonce.cli.spark_arguments.time.monotonic", lambda: float(now_s))
    progress = LineOfProgress("p", json=False)
    for began_s, now_s in rounds:
        done_s, now_s = now_s, began_s
        progress.began(manifest(), 2_000)
        now_s = done_s
        progress.advanced(advanced(1_000), 1_000)
    assert terminal.getvalue().endswith("1,000 of 2,000 offsets  100 records/s  10.0 s left")
