"""Access rights that the pipeline lacks, as far as brokers tell them; see docs/settings.md, "Access rights".

Brokers do not tell the rights on the cluster and on transactional ids. So a request that needs the right is made: for
transactional ids the end of a transaction under an id that nobody uses, which changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from exactlyonce.connectors.kafka import group_offsets
from exactlyonce.connectors.kafka.topics import TopicFacts
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.views.doctor.findings import Findings
from exactlyonce.views.doctor.subject import Subject
from exactlyonce.views.rights import CLUSTER, GROUP, TOPIC, Right, rights_of

NOBODYS = "doctor"
"""After the prefix: no sink and no coordinator has such an id."""


@dataclass
class RightsCheck:
    subject: Subject
    transactions: Transactions
    facts: Mapping[str, TopicFacts | None]
    findings: Findings

    def run(self) -> None:
        subject = self.subject
        for right in rights_of(subject.name, subject.inputs, subject.outputs, subject.start_groups):
            if right.resource == TOPIC:
                self._topic(right)
            elif right.resource == GROUP:
                what = f"rights on group {right.name}"
                with self.findings.checking(what):
                    self._compare(right, group_offsets.operations(subject.config, right.name), what)
            elif right.resource == CLUSTER:
                with self.findings.checking("rights on the cluster"):
                    self._cluster(right)
            else:
                with self.findings.checking(f"rights on transactional ids {right.name}"):
                    self._transactional_ids(right)

    def _topic(self, right: Right) -> None:
        topic = right.name
        facts, what = self.facts.get(topic), f"rights on topic {topic}"
        if facts is None:
            asked = topic in self.facts or topic not in self.subject.topics
            why = "it is missing; whoever creates it needs Create" if asked else "no broker has told of the topic"
            self.findings.not_checked(what, why, failed=not asked)
            return
        with self.findings.checking(what):
            self._compare(right, facts.operations, what)

    def _compare(self, right: Right, allowed: frozenset[str] | None, what: str) -> None:
        if allowed is None:
            raise ConfigError(f"the brokers do not say what we may do there ({what}): that needs Describe")
        missing = [operation for operation in right.operations if operation not in allowed and "All" not in allowed]
        if missing:
            self._missing(right, missing)

    def _cluster(self, right: Right) -> None:
        try:
            self.transactions.max_timeout_ms()
        except ConfigError:
            self._missing(right, right.operations)

    def _transactional_ids(self, right: Right) -> None:
        self.transactions.transaction_version()  # if this succeeds, a refusal below means that the right is missing
        try:
            self.transactions.end(f"{right.name}{NOBODYS}", 0, 0, commit=False)
        except ConfigError:
            self._missing(right, right.operations)

    def _missing(self, right: Right, missing: Sequence[str]) -> None:
        shown = f"{right.resource} {right.name}".rstrip() + (" (prefixed)" if right.prefixed else "")
        self.findings.add(
            "rights", f"We lack {', '.join(missing)} on {shown}",
            whose="the principal that this command logs in as, which is to be the run's",
            do="let an administrator grant it",
            run=[right.command(self.subject.config.bootstrap_servers, "User:<name>", missing)],
        )  # fmt: skip
