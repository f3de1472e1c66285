"""A reader of the decision log, partition 0 of the checkpoint topic, in a real cluster. Nothing here writes.

`checkpoint.decision_log` says what is read when, and what it means.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from confluent_kafka import IsolationLevel
from confluent_kafka.admin import AdminClient

from exactlyonce.checkpoint.decision_log import DECISIONS, DIGEST_HEADER, history_of, take_in
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.topic_info import TopicInfo
from exactlyonce.checkpoint.requests import DecisionRecord, Ends, LogRead, Unreadable
from exactlyonce.connectors.kafka import client as store_client
from exactlyonce.connectors.kafka.checkpoint_topic.scan import read_range
from exactlyonce.connectors.kafka.checkpoint_topic.topic import describe, find_topic
from exactlyonce.connectors.kafka.errors import explained
from exactlyonce.pipeline.errors import Halt, TopicError
from exactlyonce.pipeline.names import checkpoint_topic


class LogReader:
    """Answers what the decision log asks beside its writer. The first question connects."""

    def __init__(self, config: Mapping[str, Any], topic: TopicInfo) -> None:
        self.topic = topic
        self._config = config
        self._client: AdminClient | None = None

    def ends(self) -> Ends:
        """Of the decision log: how far readers get, and how far it goes."""
        with explained(self._config, f"asking for the end of {self.topic.name}"):
            end = self._end(IsolationLevel.READ_UNCOMMITTED)
            return Ends(self._end(IsolationLevel.READ_COMMITTED), end)

    def read(self, end: int) -> LogRead:
        """The committed decisions below offset *end*."""
        return read_log(self._config, self.topic.name, end)

    def _end(self, isolation: IsolationLevel) -> int:
        return store_client.end_offsets(self._admin, self.topic.name, [DECISIONS], isolation)[DECISIONS]

    @property
    def _admin(self) -> AdminClient:
        if self._client is None:
            self._client = store_client.admin(self._config)
        return self._client


def read_log(config: Mapping[str, Any], topic: str, end: int, start: int | None = None) -> LogRead:
    """The committed decisions in *topic* below offset *end*, from *start* on; None: from the first that is there."""
    items: list[DecisionRecord | Unreadable] = []
    with explained(config, f"reading {topic}"):
        if start is None:
            start = store_client.first_offsets(store_client.admin(config), topic, [DECISIONS])[DECISIONS]
        messages = read_range(
            config, topic, DECISIONS, start, end, "read_committed",
            lambda first, behind: items.append(Unreadable(first, behind)),
        )  # fmt: skip
        for message in messages:
            digest = dict(message.headers() or []).get(DIGEST_HEADER)
            items.append(DecisionRecord(message.key(), message.value(), digest if isinstance(digest, bytes) else None))
    return LogRead(start, tuple(items))


class LogFollower:
    """Reads the decision log of *pipeline* again and again, each time only what came since. Fences nobody."""

    def __init__(self, config: Mapping[str, Any], pipeline: str) -> None:
        self._config, self._pipeline, self._topic = config, pipeline, checkpoint_topic(pipeline)
        self._client: AdminClient | None = None
        self._topic_id = ""
        self._end = 0
        self._history = History(pipeline)

    def look(self) -> History:
        """The decisions so far: none where there is no topic, those of the new one where it was made anew.

        Raises `BrokerUnavailable` within seconds; the next look goes on from the one before. The first look connects.
        """
        with explained(self._config, f"following {self._topic}"):
            self._client = self._client or store_client.admin(self._config)
            topic = describe(self._client, self._topic)
            if topic is None:
                return History(self._pipeline)
            try:
                return self._read(self._client, topic)
            except (Halt, TopicError):
                if describe(self._client, self._topic) == topic:
                    raise
                return History(self._pipeline)

    def _read(self, client: AdminClient, topic: TopicInfo) -> History:
        """What has come in *topic*. Raises `Halt` or `TopicError` where that is deleted meanwhile."""
        with explained(self._config, f"following {self._topic}"):
            end = store_client.end_offsets(client, self._topic, [DECISIONS], IsolationLevel.READ_COMMITTED)
        if topic.topic_id != self._topic_id:
            read = read_log(self._config, self._topic, end[DECISIONS])
            self._history = history_of(self._pipeline, self._topic, read)
        elif end[DECISIONS] > self._end:
            take_in(self._history, read_log(self._config, self._topic, end[DECISIONS], self._end))
        self._topic_id, self._end = topic.topic_id, end[DECISIONS]
        return self._history


def read_topic(config: Mapping[str, Any], pipeline: str) -> tuple[TopicInfo, History]:
    """The checkpoint topic of *pipeline* and the decisions in it: both of one topic, though it may be deleted and made
    anew meanwhile; see `read_history`."""
    while True:
        topic, history = find_topic(config, pipeline), read_history(config, pipeline)
        if find_topic(config, pipeline).topic_id == topic.topic_id:
            return topic, history


def read_history(config: Mapping[str, Any], pipeline: str) -> History:
    """The decisions of *pipeline* so far, for whoever only looks: fences nobody and takes no part."""
    topic = find_topic(config, pipeline)
    ends = LogReader(config, topic).ends()
    return history_of(pipeline, topic.name, read_log(config, topic.name, ends.stable))
