"""Evidence: every outcome of a cell or a test, with its definition, the commit of the code under test, and the time.

An outcome is never dropped. A name's verdict comes from all outcomes on its newest commit: it has failed if one of them
failed, whatever the others say, unless `EXPLAINED` gives the reason. It has passed if the last outcome is of a
definition that counts today; otherwise it has passed as it was defined before.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

PRODUCT = ("checkpoint", "cli", "connectors", "engines", "pipeline", "sinks", "state")
"""The folders of the code under test: a change elsewhere leaves an outcome as good as it was."""
JSON = Path("docs/crash-matrix.json")
RELEASES_BEHIND_MAX = 1

_ENDED_EARLY = "the rig ended the run by the output of a checkpoint that the stopped worker had acknowledged"
_PROGRESS = "the rig took its own line of progress for the answer of `exactlyonce savepoint`"
EXPLAINED: Mapping[tuple[str, str], str] = {
    ("9/worker-acknowledged/stop/cycle/kafka/2/unaligned", "3e89b816"): _ENDED_EARLY,
    ("9/worker-acknowledged/stop/chain/kafka/2/unaligned", "3e89b816"): _ENDED_EARLY,
    ("53/coordinator-swept/stop/timers/kafka/1/aligned", "3e89b816"): _PROGRESS,
    ("53/savepoint-written/raise/join/kafka/1/aligned", "3e89b816"): _PROGRESS,
    ("7/worker-flushed/raise/diamond/postgres/2/unaligned", "3e89b816"): (
        "the rig waited for an event whose line stood within one of a worker's traceback"
    ),
}
"""The reason why a failure counts no more, by name and commit: a defect of the rig, shown and fixed, never bad luck."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    name: str
    """That of a cell, or a test's file and name."""
    passed: bool
    records: int
    """How many were verified."""
    seconds: float
    failure: str
    commit: str
    """The last one that changed PRODUCT; with "-dirty", and of no count, if such a file was not committed."""
    at: str
    """When it ended, in UTC: 2026-11-30T02:58:28+00:00."""
    definition: str = ""
    """A digest, see `definitions`; empty in outcomes from before there were any."""


@dataclass(frozen=True)
class Verdict:
    """What all outcomes of a name on its newest commit say, oldest first."""

    outcomes: Sequence[Outcome]
    is_of_today: bool
    """Whether the last outcome is of a definition that counts today."""

    @property
    def commit(self) -> str:
        return self.outcomes[-1].commit

    @property
    def records(self) -> int:
        return self.outcomes[-1].records

    @property
    def failures(self) -> list[str]:
        return [outcome.failure for outcome in self.outcomes if not outcome.passed]

    @property
    def reason(self) -> str | None:
        """Why its failures count no more."""
        return EXPLAINED.get((self.outcomes[-1].name, self.commit)) if self.failures else None

    @property
    def passed(self) -> bool:
        return self.is_of_today and self._all_passed

    @property
    def passed_before(self) -> bool:
        """Whether it passed as it was defined before, and not as it is defined today."""
        return not self.is_of_today and self._all_passed

    @property
    def _all_passed(self) -> bool:
        return self.outcomes[-1].passed and (not self.failures or self.reason is not None)

    @property
    def text(self) -> str:
        if self.passed_before:
            return "passed as it was defined before"
        if self.passed:
            return f"failed before, explained: {self.reason}" if self.failures else "passed"
        failed_last = not self.outcomes[-1].passed
        return "failed" if failed_last else f"failed before, then passed: {self.failures[0]}"


class Evidence:
    def __init__(self, outcomes: Iterable[Outcome], definitions: Mapping[str, Sequence[str]]) -> None:
        """*definitions*: those that count today, by name."""
        self._definitions = definitions
        self._outcomes: dict[str, list[Outcome]] = {}
        for outcome in sorted(dict.fromkeys(outcomes), key=lambda outcome: outcome.at):
            self.add(outcome)

    def add(self, outcome: Outcome) -> None:
        if not outcome.commit.endswith("-dirty"):
            self._outcomes.setdefault(outcome.name, []).append(outcome)

    def verdict(self, name: str) -> Verdict | None:
        """None: *name* was never run."""
        outcomes = self._outcomes.get(name, [])
        newest = [outcome for outcome in outcomes if outcome.commit == outcomes[-1].commit]
        return Verdict(newest, newest[-1].definition in self._definitions[name]) if newest else None

    def verdicts(self, names: Iterable[str]) -> dict[str, Verdict]:
        """Those of the *names* that were run."""
        return {name: verdict for name in names if (verdict := self.verdict(name)) is not None}

    def passed(self, name: str) -> bool:
        verdict = self.verdict(name)
        return verdict is not None and verdict.passed

    def newest(self, names: Iterable[str]) -> Outcome | None:
        """The newest outcome of any of the *names*; its commit is that of the whole."""
        outcomes = (verdict.outcomes[-1] for verdict in self.verdicts(names).values())
        return max(outcomes, key=lambda outcome: outcome.at, default=None)


def read_outcomes(lines: Iterable[str], commit: str, at: str) -> Iterator[Outcome]:
    """One for each line; *commit* and *at* are those of lines that do not say."""
    for line in lines:
        yield Outcome(**{"commit": commit, "at": at, **json.loads(line)})


def read_folder(folder: Path) -> Iterator[Outcome]:
    """Those of each `COMMIT.jsonl`, also from elsewhere: a line without a time has that of its file."""
    for file in sorted(folder.glob("*.jsonl")):
        changed = datetime.fromtimestamp(file.stat().st_mtime, timezone.utc).isoformat(timespec="seconds")
        yield from read_outcomes(file.read_text().splitlines(), file.stem, changed)


def read_whole(root: Path) -> dict[str, Any]:
    """docs/crash-matrix.json: `outcomes`, and what is true of the whole."""
    file = root / JSON
    return dict(json.loads(file.read_text())) if file.exists() else {"outcomes": []}


def read_json(root: Path) -> list[Outcome]:
    return [Outcome(**outcome) for outcome in read_whole(root)["outcomes"]]


def write_json(root: Path, evidence: Evidence, cells: Sequence[str], tests: Iterable[str]) -> None:
    """Put the verdicts' outcomes into docs/crash-matrix.json, one a line, below what is true of the whole."""
    newest = evidence.newest(cells)
    assert newest is not None, "no cell was run"
    verdicts = evidence.verdicts(cells)
    whole = {
        "commit": newest.commit,
        "date": newest.at[:10],
        "version": version_at(root, newest.commit),
        "cells": len(cells),
        "passed": sum(verdict.passed for verdict in verdicts.values()),
        "passed_on_older_commits": sum(
            verdict.passed and verdict.commit != newest.commit for verdict in verdicts.values()
        ),
        "passed_as_defined_before": sum(verdict.passed_before for verdict in verdicts.values()),
    }
    shown = {**verdicts, **evidence.verdicts(tests)}
    outcomes = [json.dumps(asdict(outcome)) for name in sorted(shown) for outcome in shown[name].outcomes]
    head = json.dumps(whole, indent=1).removesuffix("\n}")
    (root / JSON).write_text(head + ',\n "outcomes": [\n  ' + ",\n  ".join(outcomes) + "\n ]\n}\n")


def product_commit(root: Path) -> str:
    """The last commit that changed code under test, with "-dirty" if such a file has changed since."""
    last = _git(root, "log", "-1", "--format=%h", "--abbrev=8", "--", *PRODUCT)
    return (last or "unknown") + ("-dirty" if _git(root, "status", "--porcelain", "--", *PRODUCT) else "")


def product_commits_since(root: Path, commit: str) -> set[str]:
    """*commit*, and all later ones that changed code under test."""
    later = _git(root, "log", "--format=%h", "--abbrev=8", f"{commit}..HEAD", "--", *PRODUCT)
    return {commit, *later.split()}


def version_at(root: Path, commit: str) -> str:
    """The version that the code had; a clone without its history has it from docs/crash-matrix.json."""
    documented = read_whole(root)
    if documented.get("commit") == commit:
        return str(documented["version"])
    return version_in(_git(root, "show", f"{commit}:pyproject.toml") or (root / "pyproject.toml").read_text())


def version_in(project: str) -> str:
    """The version that the text of a pyproject.toml names."""
    found = re.search(r'^version = "(.+)"$', project, re.MULTILINE)
    assert found, "pyproject.toml names the version"
    return found[1]


def releases_behind(root: Path, version: str) -> int:
    """How many releases with another first or second number there were after *version*, by CHANGELOG.md's headings."""
    headings = re.findall(r"^## (\d+\.\d+)\.", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    releases = [*dict.fromkeys(headings)]
    return releases.index(".".join(version.split(".")[:2]))


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True).stdout.strip()
