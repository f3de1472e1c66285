"""The examination of a pipeline: all checks in turn. It fences nobody, and changes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack, closing

from exactlyonce.checkpoint.settings import CheckpointSettings
from exactlyonce.connectors.kafka.checkpoint_topic.topic import find_topic
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.topics import TopicFacts, Topics
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.engines import pipeline_resources
from exactlyonce.engines.pending_output import StagedOutput, find_transactions, open_ids
from exactlyonce.engines.pipeline_resources import PipelineResources
from exactlyonce.pipeline.errors import BrokerRefused, BrokerUnavailable, ConfigError, TopicError
from exactlyonce.pipeline.graph import LogicalGraph
from exactlyonce.pipeline.names import checkpoint_topic
from exactlyonce.views.doctor.checks import (
    RightsCheck,
    SettingsCheck,
    check_blocks,
    check_decisions,
    check_inputs,
    check_sources,
    check_stores,
)
from exactlyonce.views.doctor.findings import Findings, Subject
from exactlyonce.views.doctor.readers import ReadersCheck
from exactlyonce.views.transactions import find_staged

TIMEOUT_MS = 10_000


def resources_of(config: ClientConfig, name: str, graph: LogicalGraph | None) -> PipelineResources:
    """The resources of the pipeline; there may be none yet if its module was named."""
    try:
        return pipeline_resources.find(config, name)
    except TopicError:
        if graph is None:
            raise
        return PipelineResources(name, None, None, "", ())
    except ConfigError as error:  # the topic is there, and we may not read it
        return PipelineResources(name, checkpoint_topic(name), None, str(error), ())
    except (BrokerUnavailable, BrokerRefused) as error:  # one request failed; if all do, there is nothing to examine
        return PipelineResources(name, find_topic(config, name).name, None, str(error), ())


def examine(
    config: ClientConfig,
    resources: PipelineResources,
    graph: LogicalGraph | None,
    settings: CheckpointSettings,
    *,
    now_ms: int,
    older_than_ms: int,
    deep: bool,
) -> tuple[Subject, Findings]:
    findings = Findings()
    with ExitStack() as stack:
        transactions = stack.enter_context(closing(Transactions(config, timeout_ms=TIMEOUT_MS)))
        topics = stack.enter_context(closing(Topics(config)))
        subject = Subject(
            config=config, resources=resources, graph=graph, settings=settings, now_ms=now_ms, waiting=None,
            staged=StagedOutput(),
        )  # fmt: skip
        with findings.checking("open transactions of the pipeline"):
            subject.waiting = find_transactions(
                transactions, open_ids(transactions, resources.pipeline), resources.history
            )
        with findings.checking("output that waits for stores"):
            subject.staged = find_staged(config, resources, graph)
        facts = topic_facts(topics, subject.topics, findings)
        check_decisions(subject, findings)
        ReadersCheck(subject, topics, transactions, findings, older_than_ms).run()
        check_inputs(subject, topics, facts, findings)
        SettingsCheck(subject, topics, transactions, facts, findings).run()
        RightsCheck(subject, transactions, facts, findings).run()
        check_sources(subject, findings)
        check_stores(subject, findings)
        check_blocks(subject, findings, deep=deep)
    return subject, findings


def missing_rights(config: ClientConfig, graph: LogicalGraph) -> list[str]:
    """The rights in Kafka that a run of *graph* lacks, as far as brokers tell: each as a sentence without its end."""
    findings = Findings()
    with ExitStack() as stack:
        transactions = stack.enter_context(closing(Transactions(config, timeout_ms=TIMEOUT_MS)))
        topics = stack.enter_context(closing(Topics(config)))
        subject = Subject(
            config=config, resources=resources_of(config, graph.pipeline_id, graph), graph=graph,
            settings=CheckpointSettings(), now_ms=0, waiting=None, staged=StagedOutput(),
        )  # fmt: skip
        facts = topic_facts(topics, subject.topics, findings)
        RightsCheck(subject, transactions, facts, findings).run()
    return [diagnosis.what for diagnosis in findings.diagnoses]


def topic_facts(topics: Topics, names: Iterable[str], findings: Findings) -> dict[str, TopicFacts | None]:
    """The facts of each topic; None: there is no such topic. A topic without an answer is left out."""
    facts: dict[str, TopicFacts | None] = {}
    for name in names:
        with findings.checking(f"topic {name}"):
            facts[name] = topics.facts(name)
    return facts
