"""Settings of brokers and topics that do not fit the pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from exactlyonce.connectors.kafka.checkpoint_topic.topic import AtOdds, fixing, min_insync_needed, settings_at_odds
from exactlyonce.connectors.kafka.topics import TopicFacts, Topics
from exactlyonce.connectors.kafka.transactions import TRANSACTION_VERSION, Transactions
from exactlyonce.engines.external_checks.preflight import LOG_APPEND_TIME, TIMESTAMP_TYPE
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.sinks.kafka.sink import gives_times
from exactlyonce.views.doctor.findings import NOTE, Findings
from exactlyonce.views.doctor.subject import Subject

MESSAGE_BYTES_MAX = 1_000_000
"""The largest record that a producer of librdkafka sends, unless told otherwise."""


@dataclass
class SettingsCheck:
    subject: Subject
    topics: Topics
    transactions: Transactions
    facts: Mapping[str, TopicFacts | None]
    findings: Findings

    def run(self) -> None:
        with self.findings.checking("transaction.max.timeout.ms and transaction.version of the brokers"):
            self._transactions()
        for topic in self.subject.topics:
            facts = self.facts.get(topic)
            if facts is not None and facts.visible:  # another check reports missing topics
                self._replicas(facts)
                with self.findings.checking(f"settings of {topic}"):
                    self._settings(facts, self.topics.settings(topic))

    def _transactions(self) -> None:
        version = self.transactions.transaction_version()
        if version < TRANSACTION_VERSION:
            servers = self.subject.config.bootstrap_servers
            self.findings.add(
                "settings", f"The cluster runs transaction.version {version}, and {TRANSACTION_VERSION} is needed",
                whose="the cluster's",
                do="raise it: Kafka 4.0 or newer",
                run=[f"kafka-features --bootstrap-server {servers} upgrade --feature transaction.version=2"],
            )  # fmt: skip
        try:
            self.subject.settings.transaction_timeout_for(self.transactions.max_timeout_ms())
        except ConfigError as error:
            if "DescribeConfigs" in str(error):
                raise
            self.findings.add(
                "settings", str(error), whose="the brokers', or this run's", do="as it says: a run refuses"
            )

    def _replicas(self, facts: TopicFacts) -> None:
        behind = [
            partition for partition, (has, wanted) in enumerate(zip(facts.in_sync, facts.replicas, strict=True))
            if has < wanted
        ]  # fmt: skip
        if behind:
            self.findings.add(
                "settings", f"{facts.name}{behind} has replicas that are not in sync", whose="the cluster's",
                do="see which brokers are away, and their logs", level=NOTE,
            )  # fmt: skip

    def _settings(self, facts: TopicFacts, given: Mapping[str, str | None]) -> None:
        subject, replicas = self.subject, min(facts.replicas)
        if facts.name == subject.checkpoint_topic:
            self._fix(facts, "would not keep checkpoints safe", settings_at_odds(given, replicas))
            return
        wrong = []
        if given.get("unclean.leader.election.enable") == "true":
            wrong.append(AtOdds("unclean.leader.election.enable", "false", "unclean.leader.election.enable is true"))
        if facts.name in subject.outputs:
            wrong += self._output(facts, given)
        self._fix(facts, "may lose what is committed, or refuse it", wrong)
        sinks = self.subject.graph.sinks if self.subject.graph is not None else ()
        timed = any(gives_times(node.sink) for node in sinks if node.sink and node.sink.topic == facts.name)
        if timed and given.get(TIMESTAMP_TYPE) == LOG_APPEND_TIME:
            shown = f"{TIMESTAMP_TYPE} is {LOG_APPEND_TIME}, and the sink has timestamp="
            self._fix(facts, "does not keep the times of its sink", [AtOdds(TIMESTAMP_TYPE, "CreateTime", shown)])

    def _output(self, facts: TopicFacts, given: Mapping[str, str | None]) -> list[AtOdds]:
        """Settings that refuse records, or that lose them with a broker."""
        wrong = []
        replicas, in_sync = min(facts.replicas), int(given.get("min.insync.replicas") or 1)
        needed = min_insync_needed(replicas)
        if not needed <= in_sync <= replicas:
            shown = f"min.insync.replicas is {in_sync} with {replicas} replicas, should be {needed}"
            wrong.append(AtOdds("min.insync.replicas", str(needed), shown))
        elif min(facts.in_sync) < in_sync:
            self.findings.add(
                "settings", f"{facts.name} takes no records: fewer replicas are in sync than min.insync.replicas, "
                f"{in_sync}", whose="the cluster's", do="see which brokers are away, and their logs",
            )  # fmt: skip
        largest = int(self.subject.config.settings.get("message.max.bytes") or MESSAGE_BYTES_MAX)
        if int(given.get("max.message.bytes") or largest) < largest:
            shown = f"max.message.bytes is {given['max.message.bytes']}, and the sink sends up to {largest} in a record"
            wrong.append(AtOdds("max.message.bytes", str(largest + 48_588), shown))
        return wrong

    def _fix(self, facts: TopicFacts, why: str, wrong: list[AtOdds]) -> None:
        if wrong:
            self.findings.add(
                "settings", f"Topic {facts.name} {why}: {'; '.join(setting.what for setting in wrong)}",
                whose=f"the topic's ({self._role(facts.name)})", do="set it",
                run=[fixing(self.subject.config, facts.name, wrong)],
            )  # fmt: skip

    def _role(self, topic: str) -> str:
        if topic == self.subject.checkpoint_topic:
            return "checkpoints"
        return "output" if topic in self.subject.outputs else "input"
