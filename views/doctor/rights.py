"""Access rights that the pipeline lacks, as far as brokers tell them; see docs/settings.md, "Access rights".

Brokers do not tell the rights on the cluster and on transactional ids. So a request that needs the right is made: for
transactional ids the end of a transaction under an id that nobody uses, which changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from exactlyonce.checkpoint.records.committable import transaction_prefix
from exactlyonce.connectors.kafka import group_offsets
from exactlyonce.connectors.kafka.topics import TopicFacts
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.views.doctor.findings import Findings
from exactlyonce.views.doctor.subject import Subject

OF_INPUT = ("Read",)
OF_OUTPUT = ("Read", "Write")
OF_CHECKPOINTS = ("Read", "Write", "DescribeConfigs")
OF_TRANSACTIONS = ("Write",)
OF_GROUP = ("Read",)
OF_START_GROUP = ("Describe",)
OF_CLUSTER = ("DescribeConfigs",)
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
        for topics, needed in ((subject.inputs, OF_INPUT), (subject.outputs, OF_OUTPUT)):
            for topic in topics:
                self._topic(topic, needed)
        self._topic(subject.checkpoint_topic, OF_CHECKPOINTS)
        what = f"rights on group {subject.name}"
        with self.findings.checking(what):
            self._compare("group", subject.name, OF_GROUP, group_offsets.operations(subject.config, subject.name), what)
        for group in subject.start_groups:
            what = f"rights on group {group}"
            with self.findings.checking(what):
                self._compare("group", group, OF_START_GROUP, group_offsets.operations(subject.config, group), what)
        with self.findings.checking("rights on the cluster"):
            self._cluster()
        with self.findings.checking(f"rights on transactional ids {transaction_prefix(subject.name)}"):
            self._transactional_ids()

    def _topic(self, topic: str, needed: tuple[str, ...]) -> None:
        facts, what = self.facts.get(topic), f"rights on topic {topic}"
        if facts is None:
            asked = topic in self.facts or topic not in self.subject.topics
            why = "it is missing; whoever creates it needs Create" if asked else "no broker has told of the topic"
            self.findings.not_checked(what, why, failed=not asked)
            return
        with self.findings.checking(what):
            self._compare("topic", topic, needed, facts.operations, what)

    def _compare(
        self, kind: str, name: str, needed: tuple[str, ...], allowed: frozenset[str] | None, what: str
    ) -> None:
        if allowed is None:
            raise ConfigError(f"the brokers do not say what we may do there ({what}): that needs Describe")
        missing = [operation for operation in needed if operation not in allowed and "All" not in allowed]
        if missing:
            self._missing(kind, name, missing, prefixed=False)

    def _cluster(self) -> None:
        try:
            self.transactions.max_timeout_ms()
        except ConfigError:
            self._missing("cluster", "", list(OF_CLUSTER), prefixed=False)

    def _transactional_ids(self) -> None:
        self.transactions.transaction_version()  # if this succeeds, a refusal below means that the right is missing
        prefix = transaction_prefix(self.subject.name)
        try:
            self.transactions.end(f"{prefix}{NOBODYS}", 0, 0, commit=False)
        except ConfigError:
            self._missing("transactional-id", prefix, list(OF_TRANSACTIONS), prefixed=True)

    def _missing(self, kind: str, name: str, missing: list[str], *, prefixed: bool) -> None:
        shown = f"{kind} {name}".rstrip()
        servers = self.subject.config.bootstrap_servers
        operations = " ".join(f"--operation {operation}" for operation in missing)
        grant = f"kafka-acls --bootstrap-server {servers} --add --allow-principal User:<name>"
        resource = f"--{kind} {name}".rstrip() + (" --resource-pattern-type prefixed" if prefixed else "")
        self.findings.add(
            "rights", f"We lack {', '.join(missing)} on {shown}" + (" (prefixed)" if prefixed else ""),
            whose="the principal that this command logs in as, which is to be the run's",
            do="let an administrator grant it",
            run=[f"{grant} {operations} {resource}"],
        )  # fmt: skip
