"""`exactlyonce config show` says what a run would have, and why."""

from __future__ import annotations

from typing import Any

from tests.cli.conftest import Command

SECRET = "hunter-2-hunter"


def shown(command: Command, *arguments: str, **environment: Any) -> dict[str, tuple[str, str]]:
    ended = command("config", "show", "--json", *arguments, **environment)
    assert (ended.code, ended.err) == (0, "")
    assert SECRET not in ended.out
    rows: list[dict[str, Any]] = ended.json
    return {f"{row['table']}.{row['key']}": (row["value"], row["origin"]) for row in rows}


def test_each_setting_has_its_value_and_its_origin(command: Command) -> None:
    """The command line wins over the file, the file over the environment."""
    (command.folder / "c.toml").write_text(
        '[run]\nparallelism = 4\nuntil = "latest"\n[checkpoint]\ninterval = "2500ms"\n'
        '[restart]\nstrategy = "fixed_delay"\nattempts = 7\n'
        f'[kafka]\n"sasl.password" = "{SECRET}"\n"sasl.username" = "ann"\n"sasl.mechanism" = "PLAIN"\n'
    )
    given = ("--config", "c.toml", "--parallelism", "2", "--kafka", "security.protocol=SASL_SSL")
    rows = shown(command, *given, EXACTLYONCE_BOOTSTRAP_SERVERS="broker:9092")
    assert rows["run.parallelism"] == ("2", "command line")
    assert rows["run.until"] == ("latest", "file")
    assert rows["run.ui"] == ("none", "default")
    assert rows["checkpoint.interval"] == ("2500ms", "file")
    assert rows["checkpoint.timeout"] == ("1m", "default")
    assert rows["restart.attempts"] == ("7", "file")
    assert rows["restart.delay"] == ("1s", "default")
    assert rows["kafka.bootstrap.servers"] == ("broker:9092", "environment")
    assert rows["kafka.security.protocol"] == ("SASL_SSL", "command line")
    assert rows["kafka.sasl.password"] == ("***", "file")
    assert rows["kafka.sasl.username"] == ("ann", "file")


def test_a_reference_to_a_secret_is_shown(command: Command) -> None:
    """It is not looked up: the variable need not be there."""
    sasl = ("security.protocol=SASL_SSL", "sasl.mechanism=PLAIN", "sasl.username=ann", "sasl.password=env:NO_SUCH")
    rows = shown(command, "--bootstrap-servers", "h:1", *(word for one in sasl for word in ("--kafka", one)))
    assert rows["kafka.sasl.password"] == ("env:NO_SUCH", "command line")


def test_no_cluster_is_needed(command: Command) -> None:
    ended = command("config", "show", EXACTLYONCE_BOOTSTRAP_SERVERS="")
    assert ended.code == 0
    assert ended.out.splitlines()[1].split() == ["[kafka]", "bootstrap.servers", "none", "default"]


def test_a_wrong_file_is_refused(command: Command) -> None:
    (command.folder / "c.toml").write_text("[run]\nparallelism = 0\n")
    ended = command("config", "show", "--config", "c.toml")
    assert (ended.code, ended.out) == (2, "")
    assert "parallelism is 0: it must be at least 1." in ended.err
