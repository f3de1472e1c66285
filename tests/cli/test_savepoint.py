"""`exactlyonce savepoint`: which checkpoint is exported of a pipeline that does not run, and what is kept of one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import Finalized, Manifest, OperatorSnapshot, SourceOffset
from exactlyonce.cli.commands import savepoint
from exactlyonce.cli.commands.savepoints import as_text
from exactlyonce.cli.main import main, parser
from exactlyonce.cli.text import new_namespace
from exactlyonce.engines import run_requests
from exactlyonce.engines.savepoints import taking
from exactlyonce.engines.savepoints.taking import _newest
from exactlyonce.pipeline.errors import ConfigError
from tests.cli.conftest import manifest

OF_THE_TOPIC = ["savepoint", "totals"]
EXPORTED = [*OF_THE_TOPIC, "--to", "file:///backups"]


def history(*, finalized: int) -> History:
    found = History("totals")
    for number in (0, 1):
        found.manifests[number] = manifest(pipeline="totals", checkpoint=number, kind="initial")
        if number <= finalized:
            found.finalized[number] = Finalized(number, 1, 0, ())
    return found


def test_only_what_is_finalized_is_exported() -> None:
    """The message on an unfinalized checkpoint says what finishes it."""
    assert _newest(history(finalized=1), exported=True, stop=False).checkpoint == 1
    with pytest.raises(
        ConfigError, match=r"Checkpoint 1 of totals is decided.*`exactlyonce transactions commit totals`"
    ):
        _newest(history(finalized=0), exported=True, stop=False)


@pytest.mark.parametrize("line", [OF_THE_TOPIC, [*EXPORTED, "--stop"], [*OF_THE_TOPIC, "--stop"]], ids=" ".join)
def test_nobody_takes_one(line: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"totals does not run.* goes on from checkpoint 1\."):
        _newest(history(finalized=1), exported="--to" in line, stop="--stop" in line)


Taking = Callable[..., Manifest]


@pytest.fixture
def take_one(monkeypatch: pytest.MonkeyPatch) -> Taking:
    """Has a run take a savepoint for the requests, and export it, as the answers say, to a folder below its URL."""

    def prepared(*requests: str, export: Any = None, delete: Any = None) -> Manifest:
        taken = msgspec.structs.replace(history(finalized=1).manifests[1], kind="savepoint", requests=requests)
        answers: dict[tuple[Any, str], Any] = {
            (run_requests, "living_run"): lambda history: object(),
            (run_requests, "savepoint"): lambda *args, **options: taken,
            (run_requests, "delete"): delete or Mock(),
            (savepoint, "client"): lambda args: SimpleNamespace(confluent=dict),
            (taking, "open_savepoint"): lambda config, manifest: nullcontext(),
            (taking, "require_place"): lambda url: None,
            (taking, "export"): export or (lambda contents, url: f"{url}/totals-1-1f2e3d4c"),
            (taking, "read_history"): lambda *args: history(finalized=1),
        }
        for (module, name), answer in answers.items():
            monkeypatch.setattr(module, name, answer)
        return taken

    return prepared


@pytest.mark.parametrize("requests", [("mine",), ("mine", "somebody-else's")], ids=len)
def test_what_others_have_asked_for_stays(
    requests: tuple[str, ...], take_one: Taking, capsys: pytest.CaptureFixture[str]
) -> None:
    """An export releases the savepoint in the topic, unless somebody else asked for it too."""
    deleted: list[int] = []
    take_one(*requests, delete=lambda config, pipeline, checkpoint, timeout_ms, note: deleted.append(checkpoint))
    assert savepoint.savepoint(parser().parse_args(EXPORTED)) == 0
    shared = len(requests) > 1
    assert deleted == ([] if shared else [1])
    told = "Another request came at the same time" in (shown := capsys.readouterr().out)
    assert told == ("is kept until `exactlyonce savepoints delete totals 1`" in shown) == shared


def test_an_export_that_is_interrupted(take_one: Taking, capsys: pytest.CaptureFixture[str]) -> None:
    """The savepoint never expires, so that it is said which it is, and how it is deleted."""

    def interrupted(contents: object, url: str) -> str:
        raise KeyboardInterrupt

    take_one("mine", export=interrupted)
    assert main(EXPORTED) == 130
    assert "Savepoint 1 was taken, but could not be exported. It is kept until" in capsys.readouterr().err


@pytest.mark.parametrize("line", [EXPORTED, [*EXPORTED, "--json"]], ids=" ".join)
def test_an_export_is_named_once_it_is_whole(
    line: list[str], take_one: Taking, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its URL is shown before the run is asked to let go of the savepoint, for which one may not wait."""
    shown = []

    def delete(*args: Any) -> None:
        shown.append(capsys.readouterr().out)
        raise KeyboardInterrupt

    take_one("mine", delete=delete)
    with pytest.raises(KeyboardInterrupt):
        savepoint.savepoint(parser().parse_args(line, new_namespace()))
    assert "file:///backups/totals-1-1f2e3d4c" in shown[0]
    assert "savepoints delete totals 1`" in capsys.readouterr().err


def test_a_place_that_takes_no_export_is_told_before_a_run_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each try would leave a savepoint else. A place that takes one is left as it was, or made."""
    monkeypatch.setattr(savepoint, "client", lambda args: SimpleNamespace(confluent=dict))
    reached = RuntimeError("the run is looked for")
    monkeypatch.setattr(taking, "read_history", Mock(side_effect=reached))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be made, for a file is where a folder is needed"):
        savepoint.savepoint(parser().parse_args([*OF_THE_TOPIC, "--to", f"file://{tmp_path}/file/kept"]))
    (tmp_path / "file").unlink()
    with pytest.raises(RuntimeError, match="looked for"):
        savepoint.savepoint(parser().parse_args([*OF_THE_TOPIC, "--to", f"file://{tmp_path}/new/kept"]))
    assert [*tmp_path.rglob("*")] == [tmp_path / "new", tmp_path / "new" / "kept"]


def listed(number: int, partitions: int) -> Manifest:
    offsets = [SourceOffset("orders", "shop.orders.v2", "id", each, 184_467_440 + each) for each in range(partitions)]
    offsets.append(SourceOffset("rates", "exchange-rates", "id", 0, 5))
    operators = tuple(OperatorSnapshot(each, 1, 3 << 29, ()) for each in ("totals", "names"))
    return manifest(
        checkpoint=number, kind="savepoint", completed_at_ms=1_000_113, offsets=tuple(offsets), operators=operators
    )


def test_the_list_fits() -> None:
    some = [listed(98_417, 12), listed(98_502, 12)]
    header, *lines = as_text(some, {98_417}, 100)
    assert header == "   id  state      completed            state size"
    assert max(map(len, [header, *lines])) <= 100
    rows = [line.split() for line in lines if line.startswith("98")]
    assert [(row[0], row[1], *row[-2:]) for row in rows] == [
        ("98417", "finalized", "3.0", "GB"), ("98502", "decided", "3.0", "GB"),
    ]  # fmt: skip
    shown = " ".join(lines).split()
    for each in some[0].offsets:
        assert shown.count(f"{each.topic}[{each.partition}]={each.offset}") == len(some)
    assert [line.strip()[:14] for line in lines if "Sn of" in line] == ["Sn of orders  ", "Sn of rates   "] * 2
