"""Writes manifests to the decision log in two steps: what is produced is nothing until it is committed.

Invariant: of what was produced, one thing becomes: it is committed, or taken back before anything else is written.
"""

from __future__ import annotations

from exactlyonce.checkpoint.decision_log import DecisionLog, Staged
from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.checkpoint.requests import Appended, Procedure
from exactlyonce.checkpoint.transactions.broker_answers import Outcome


class ManifestWriter:
    """Writes one manifest after the other to *log*, in two steps each."""

    def __init__(self, log: DecisionLog) -> None:
        self._log = log
        self._produced: tuple[Manifest, Staged] | None = None

    @property
    def refusal(self) -> str:
        """Why the last one could not be produced."""
        return self._log.refusal

    def produce(self, manifest: Manifest) -> Procedure[bool]:
        """Bring *manifest* into a transaction; False: it was not, and never will be seen."""
        staged = self._log.stage((manifest,))
        self._produced = manifest, staged
        return (yield from self._log.produce(staged))

    def commit(self) -> Procedure[Outcome]:
        """Decide what was produced; `DONE` once readers see it, or `UNKNOWN`."""
        assert self._produced is not None, "it was produced"
        manifest, staged = self._produced
        outcome = yield from self._log.commit(staged)
        if outcome is Outcome.DONE:
            yield Appended((manifest,))
        return outcome

    def take_back(self, why: str) -> Procedure[None]:
        """Abort what was produced."""
        yield from self._log.take_back(why)
