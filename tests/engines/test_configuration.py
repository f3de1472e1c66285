"""Settings as people write them, and what is said of those that are wrong."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from exactlyonce import Pipeline
from exactlyonce.cli.commands.run import settings_given
from exactlyonce.cli.main import parser
from exactlyonce.connectors import KafkaSource
from exactlyonce.engines.blocks import state_backend
from exactlyonce.engines.configuration import BOOTSTRAP_VARIABLE, TABLES, options_from
from exactlyonce.engines.options import HASHMAP, ROCKSDB, Restoration, StateSettings
from exactlyonce.pipeline.durations import Duration, duration_ms
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.sinks import PrintSink


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BOOTSTRAP_VARIABLE, "environment:1")


def written(folder: Path, text: str) -> str:
    path = folder / "settings.toml"
    path.write_text(text)
    return str(path)


def test_what_is_given_wins_over_the_file_and_the_file_over_the_environment(tmp_path: Path) -> None:
    text = '[run]\nparallelism = 3\n[checkpoint]\ninterval = "2s"\ntimeout = "30s"\n[kafka]\n"linger.ms" = 5\n'
    file = written(tmp_path, text + '"client.id" = "file"\n')
    options = options_from({"config": file, "checkpoint_interval": "500ms", "kafka": {"client.id": "given"}})
    assert (options.parallelism, options.checkpoint.interval_ms, options.checkpoint.timeout_ms) == (3, 500, 30_000)
    assert options.client.settings["client.id"] == "given"
    assert options.client.settings["linger.ms"] == "5"
    assert options.client.bootstrap_servers == "environment:1"
    file = written(tmp_path, '[kafka]\n"bootstrap.servers" = "toml:1"\n')
    assert options_from({"config": file}).client.bootstrap_servers == "toml:1"
    for given in ({"bootstrap_servers": "given:1"}, {"kafka": {"metadata.broker.list": "given:1"}}):
        assert options_from({"config": file, **given}).client.bootstrap_servers == "given:1"
    file = written(tmp_path, "[checkpoint]\nincremental = false")
    assert options_from({"incremental": True, "config": file}).checkpoint.incremental
    with pytest.raises(ConfigError, match=r"bootstrap\.servers is set twice, with different values"):
        options_from({"bootstrap_servers": "given:1", "kafka": {"bootstrap.servers": "another:1"}})


def test_where_state_is_kept(tmp_path: Path) -> None:
    file = written(tmp_path, '[state]\nbackend = "rocksdb"\nmemory = "2gb"\nfolder = "/fast"\n')
    state = options_from({"config": file}).state
    assert (state.backend, state.memory_bytes, str(state.path)) == ("rocksdb", 2 << 30, "/fast")
    state = options_from({"config": file, "state_memory": "64mb"}).state
    assert (state.backend, state.memory_bytes, state.folder) == ("rocksdb", 64 << 20, "/fast")


def test_what_operators_of_before_have_left_on_this_machine(tmp_path: Path) -> None:
    """A worker that starts with `rocksdb` deletes it, of its own pipeline alone."""
    pipeline = Pipeline("totals")
    pipeline.source("in", KafkaSource("in", value=int)).sink("out", PrintSink())
    for left in ("totals/renamed/0-127", "totals/in/0-127", "others/renamed/0-127"):
        (tmp_path / left / "saved-0a1b").mkdir(parents=True)
    for backend in (HASHMAP, ROCKSDB):
        state_backend(StateSettings(backend, folder=str(tmp_path)), pipeline.build(), 0, 1).close()
        there = sorted(str(each.relative_to(tmp_path)) for each in tmp_path.glob("*/*"))
        assert there == ["others/renamed", "totals/in", *(["totals/renamed"] if backend == HASHMAP else [])]


@pytest.mark.parametrize(
    ("text", "given", "named"),
    [
        ("", {"state_memory": "64mb"}, "state_memory (--state-memory): that"),
        ("", {"state_folder": "/fast", "state_backend": "hashmap"}, "state_folder (--state-folder): that"),
        ("[state]\nmemory = '2gb'\nfolder = '/fast'", {}, "[state] memory and [state] folder: that"),
        ("[state]\nmemory = '2gb'\nbackend = 'hashmap'", {"state_backend": "hashmap"}, "[state] memory: that"),
        (
            "[state]\nmemory = '2gb'\nbackend = 'rocksdb'",
            {"state_backend": "hashmap", "state_memory": "1gb"},
            "state_memory (--state-memory): that",
        ),
    ],
)
def test_settings_of_a_backend_that_is_not_taken(text: str, given: dict[str, str], named: str, tmp_path: Path) -> None:
    """A run refuses them with what to do, for they would do nothing; a command that keeps no state takes them."""
    options = options_from({"config": written(tmp_path, text), **given})
    with pytest.raises(ConfigError) as error:
        options.state.check()
    assert str(error.value).startswith(f"{named} is for rocksdb, and state_backend (--state-backend) is hashmap")


@pytest.mark.parametrize("backend", ["", "backend = 'rocksdb'\n"])
def test_a_file_that_pipelines_share(backend: str, tmp_path: Path) -> None:
    file = written(tmp_path, f"[state]\n{backend}memory = '2gb'\nfolder = '{tmp_path}'")
    options_from({"config": file, "state_backend": "hashmap"}).state.check()
    state = options_from({"config": file, "state_backend": "rocksdb"}).state
    assert (state.contradicting, state.memory_bytes) == ((), 2 << 30)


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("[run]\nparallelism = 'two'", "parallelism is 'two': write a whole number"),
        ("[run]\nparallelism = true", "parallelism is True: write a whole number"),
        ("[run]\nparallelism = 0", "parallelism is 0: it must be at least 1"),
        ("[run]\ncheckpoint_partitions = 1", "checkpoint_partitions .* is 1: it must be at least 2"),
        ("[run]\nuntil = 'later'", "until is 'later'. Write one of: running, latest."),
        ("[run]\ncolour = 2", "\\[run\\] has no key 'colour'. It has: parallelism"),
        ("[run]\nfrom_savepoint = 'first'", "from_savepoint \\(--from-savepoint\\): it is neither a URL"),
        ("[run]\nparalelism = 2", "\\[run\\] has no key 'paralelism'. Did you mean parallelism"),
        ("[run]\ninterval = '1s'", "\\[run\\] has no key 'interval'. Write it in \\[checkpoint\\], as interval"),
        ("[run]\ncheckpoint_interval = '1s'", "Write it in \\[checkpoint\\], as interval"),
        ("[run]\nfrom_savepoint = 1\nrewind = true", "\\[run\\] has no key 'rewind'"),
        ("[run]\nfrom_savepoint = 1\nmap = 'a=b'", "map is 'a=b': .* as {old = \"new\"}"),
        ("[run]\nfrom_savepoint = 1\nmap = {a = 1}", "map is {'a': 1}: write a name for each name"),
        (
            "[run]\nfrom_savepoint = 1\nallow_dropped_state = 'yes'",
            "allow_dropped_state .* is 'yes': write true or false",
        ),
        ("[run]\nmap = {a = 'b'}", "map is for a run that begins from a savepoint: add --from-savepoint"),
        ("parallelism = 2", "'parallelism' is in no table. Write it in \\[run\\], as parallelism"),
        ("[run]\nbootstrap_servers = 'h:1'", 'Write it in \\[kafka\\], as "bootstrap.servers"'),
        ("[checkpoints]\n", "no table \\[checkpoints\\]. Did you mean \\[checkpoint\\]"),
        ("[checkpoint]\ninterval = 500", "checkpoint_interval .* is 500, without a unit: write "),
        ("[checkpoint]\ninterval = '1ms'", "checkpoint_interval .* is 1ms: it must be at least 10ms"),
        ("[state]\nbackend = 'disk'", "state_backend \\(--state-backend\\) is 'disk': choose one of hashmap, rocksdb"),
        ("[state]\nmemory = 'much'", "state_memory .* is 'much': write a number with a unit, as 64kb"),
        ("[state]\nmemory = '10kb'", "is 10kb: it must be at least 1mb"),
        ("[state]\nsize = 1", "\\[state\\] has no key 'size'. It has: backend, memory, folder"),
        ("[restart]\nstrategy = 'never'", "There is no restart strategy 'never'"),
        ("[restart]\nstrategy = 'none'\ndelay = '1s'", "not take all of: delay. It takes no options"),
        ("[restart]\nattempts = 1.5", "restart attempts is 1.5: write a whole number"),
        ("[kafka]\nacks = 1", "acks: exactlyonce sets this itself"),
        ("[run", "is not valid TOML"),
    ],
)
def test_a_wrong_file_is_an_error_that_names_the_place(text: str, mistake: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=mistake):
        options_from({"config": written(tmp_path, text)})


@pytest.mark.parametrize(
    ("options", "mistake"),
    [
        ({"restart": "none"}, "restart is 'none': write a dict, as {\"strategy\""),
        ({"kafka": "x"}, "has to be a dict"),
        ({"unaligned": "yes"}, "unaligned is 'yes': write true or false"),
        ({"paralelism": 2}, r"^There is no option 'paralelism'\. Did you mean parallelism\?$"),
        ({"interval": "1s"}, "no option 'interval'. Options are: .*checkpoint_interval.*log_level.*on_event"),
        ({"from_savepoint": 1, "map": "x"}, "map is 'x': write a name for each name"),
        ({"from_savepoint": 1, "map": {1: "a"}}, "is {1: 'a'}: write a name for each name"),
        ({"from_savepoint": "²"}, "from_savepoint \\(--from-savepoint\\): it is neither a URL"),
        ({"config": "absent.toml"}, "absent\\.toml cannot be read: No such file"),
    ],
)
def test_a_wrong_keyword_is_an_error_that_says_what_may_be_written(options: dict[str, Any], mistake: str) -> None:
    with pytest.raises(ConfigError, match=mistake):
        options_from(options)


def test_a_file_that_cannot_be_decoded(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_bytes(b"x = '\xff'")
    with pytest.raises(ConfigError, match=r"c\.toml is no UTF-8, at byte 5: save it so"):
        options_from({"config": str(tmp_path / "c.toml")})


def test_a_missing_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BOOTSTRAP_VARIABLE)
    with pytest.raises(ConfigError, match="No Kafka cluster is named"):
        options_from({})


OTHERS: dict[str, dict[str, Any]] = {
    "run": {
        "parallelism": 2, "until": "latest", "drain": True, "max_late": 0.25, "standby": True, "ui": "127.0.0.1:8080",
        "metrics": "127.0.0.1:9100", "traces": "http://127.0.0.1:4318", "repair": "halt",
        "serve": "127.0.0.1:8086", "serve_token": "env:STATE_TOKEN",
        "checkpoint_partitions": 9, "from_savepoint": "s3://bucket/prefix/1", "map": {"sums": "totals"},
        "allow_dropped_state": True, "broker_timeout": "3m", "log_format": "text",
    },
    "checkpoint": {
        "mode": "at_least_once", "retention": "delete_on_cancellation", "storage": "s3://bucket/prefix",
        "unaligned": True, "incremental": False, "aligned_timeout": "2s", "interval": "2s", "timeout": "3s",
        "deploy_timeout": "7m", "min_pause": "1s", "restart_budget": "30s", "store_timeout": "20m",
        "stop_timeout": "9s", "transaction_timeout": "5m",
        "max_concurrent": 2, "tolerable_failed": 4, "num_retained": 5,
    },
    "state": {"backend": "rocksdb", "memory": "2gb", "folder": "/fast"},
}  # fmt: skip
"""Settings other than the default, by table of a file and key."""
NEEDED: dict[str, dict[str, Any]] = {
    "drain": {"until": "latest"},
    "map": {"from_savepoint": 12},
    "allow_dropped_state": {"from_savepoint": 12},
    "aligned_timeout": {"unaligned": True},
    "memory": {"backend": "rocksdb"},
    "folder": {"backend": "rocksdb"},
}
"""Settings without which others make no sense."""


def directly(table: str, key: str) -> str:
    return TABLES[table][key].keyword


def on_the_line(keywords: dict[str, Any]) -> list[str]:
    flags = {name.replace("_", "-"): value for name, value in keywords.items() if not isinstance(value, dict)}
    named = [(name, *pair) for name, value in keywords.items() if isinstance(value, dict) for pair in value.items()]
    switches = {True: "--{}", False: "--no-{}"}
    pairs = [f"--{name}={old}={new}" for name, old, new in named]
    return pairs + [switches[v].format(n) if isinstance(v, bool) else f"--{n}={v}" for n, v in flags.items()]


def in_a_file(table: str, content: dict[str, Any]) -> str:
    return f"[{table}]\n" + "".join(f"{name} = {as_toml(value)}\n" for name, value in content.items())


def as_toml(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name} = {as_toml(each)}' for name, each in value.items())}}}"
    return str(value).lower() if isinstance(value, bool) else repr(value)


@pytest.mark.parametrize(("table", "key"), [(table, key) for table, keys in OTHERS.items() for key in keys])
def test_a_setting_is_the_same_wherever_it_is_given(table: str, key: str, tmp_path: Path) -> None:
    needed = NEEDED.get(key, {})
    content = {**needed, key: OTHERS[table][key]}
    given = {directly(table, name): value for name, value in content.items()}
    in_python = options_from(given)
    args = parser().parse_args(["run", "orders:pipeline", *on_the_line(given)])
    assert options_from(settings_given(args)) == in_python
    assert options_from({"config": written(tmp_path, in_a_file(table, content))}) == in_python
    assert options_from({directly(table, name): value for name, value in needed.items()}) != in_python


def test_no_setting_of_a_file_is_left_out() -> None:
    """The settings compared in three places are all that a file may have, except restarts and Kafka's own."""
    assert {table: {*keys} for table, keys in OTHERS.items()} == {table: {*keys} for table, keys in TABLES.items()}


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("none", {}),
        ("fixed_delay", {"attempts": 3, "delay": "2s"}),
        ("failure_rate", {"failures": 2, "window": "5m", "delay": "2s"}),
        ("exponential_delay", {"initial": "1s", "max": "1m"}),
    ],
)
def test_a_restart_strategy_is_the_same_wherever_it_is_given(
    strategy: str, options: dict[str, Any], tmp_path: Path
) -> None:
    content = {"strategy": strategy, **options}
    in_python = options_from({"restart": content})
    assert dict(in_python.restart).keys() == {
        "strategy", *(name if isinstance(value, int) else f"{name}_ms" for name, value in options.items())
    }  # fmt: skip
    line = ":".join([strategy, *([",".join(f"{name}={value}" for name, value in options.items())] if options else [])])
    assert options_from(settings_given(parser().parse_args(["run", "orders:pipeline", "--restart", line]))) == in_python
    assert options_from({"config": written(tmp_path, in_a_file("restart", content))}) == in_python


def test_a_savepoint_of_a_file(tmp_path: Path) -> None:
    """Names of operators win one by one. Settings of the file's savepoint do not count for another one."""
    text = "[run]\nfrom_savepoint = 3\nmap = {sums = 'totals', seen = 'known'}\nallow_dropped_state = true"
    file = written(tmp_path, text)
    assert options_from({"config": file}).restoration == Restoration("3", {"sums": "totals", "seen": "known"}, True)
    line = ["run", "orders:pipeline", "--config", file, "--map", "seen=met", "--rewind"]
    expected = Restoration("3", {"sums": "totals", "seen": "met"}, allow_dropped=True, rewind=True)
    assert options_from(settings_given(parser().parse_args(line))).restoration == expected
    another = options_from(settings_given(parser().parse_args([*line, "--from-savepoint", "4"]))).restoration
    assert another == Restoration("4", {"seen": "met"}, rewind=True)
    kept = options_from({"config": file, "allow_dropped_state": False}).restoration
    assert kept == Restoration("3", {"sums": "totals", "seen": "known"})


@pytest.mark.parametrize(
    ("duration", "milliseconds"),
    [("500ms", 500), ("1.5s", 1_500), ("10m", 600_000), (timedelta(hours=1), 3_600_000), (timedelta(0), 0)],
)
def test_durations(duration: Duration, milliseconds: int) -> None:
    assert duration_ms(duration) == milliseconds


@pytest.mark.parametrize(
    ("duration", "mistake"),
    [
        (5, r'is 5, without a unit: write "5s", or timedelta\(seconds=5\) in Python\.$'),
        (5.5, r"is 5\.5: write a number with a unit, as 500ms, .*, or a timedelta\.$"),
        (True, r"is True: write a number with a unit"),
        ("0.5ms", r"is '0\.5ms': the smallest unit is 1ms\.$"),
        (timedelta(microseconds=500), r"is .*microseconds=500\): the smallest unit is 1ms\.$"),
        (timedelta(seconds=-1), r"is .*: it must not be negative\.$"),
    ],
)
def test_a_duration_that_is_none_says_what_to_write(duration: Any, mistake: str) -> None:
    with pytest.raises(ConfigError, match=mistake):
        options_from({"bootstrap_servers": "h:1", "checkpoint_interval": duration})


def test_a_size_may_be_a_number_of_bytes() -> None:
    given = {"bootstrap_servers": "h:1", "state_backend": "rocksdb", "state_memory": 1 << 30}
    assert options_from(given).state.memory_bytes == options_from(given | {"state_memory": "1gb"}).state.memory_bytes
    with pytest.raises(ConfigError, match=r"is 1\.5: write a number with a unit, as 64kb, 512mb or 2gb, or of bytes"):
        options_from(given | {"state_memory": 1.5})


def test_a_path_from_the_working_directory_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A savepoint takes a relative path; a checkpoint storage takes only one that is the same everywhere."""
    monkeypatch.chdir(tmp_path)
    restoration = options_from({"from_savepoint": "./backups/1"}).restoration
    assert restoration == Restoration(f"{tmp_path}/backups/1")
    with pytest.raises(ConfigError, match="it is neither a URL nor an absolute path"):
        options_from({"checkpoint_storage": "./checkpoints"})
