"""Reading the decision log, partition 0 of the checkpoint topic, in a real cluster. Nothing here writes.

`checkpoint.decision_log` says what is read when, and what it means.
"""

from __future__ import annotations

from contextlib import closing

from exactlyonce.checkpoint.decision_log import DECISIONS, DIGEST_HEADER, history_of, take_in
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import TopicInfo
from exactlyonce.checkpoint.requests import DecisionRecord, Ends, LogRead, Unreadable
from exactlyonce.connectors.kafka.checkpoint_topic.scan import read_range
from exactlyonce.connectors.kafka.checkpoint_topic.topic import TIMEOUT_MS, describe, found
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.errors import explained
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.pipeline.errors import BrokerUnavailable, Halt, TopicError
from exactlyonce.pipeline.names import checkpoint_topic


def stable_end(topics: Topics, topic: str) -> int:
    """The last stable offset of the decision log in *topic*."""
    return topics.end_offsets(topic, [DECISIONS], committed=True)[DECISIONS]


def log_ends(topics: Topics, topic: str) -> Ends:
    """The last stable offset of the decision log in *topic*, and its end."""
    offsets = topics.log_offsets(topic, [DECISIONS])
    return Ends(offsets.stable[DECISIONS], offsets.end[DECISIONS])


def read_log(topics: Topics, topic: str, end: int, start: int | None = None) -> LogRead:
    """The committed decisions in *topic* below offset *end*, from *start* on; None: from the first that is there."""
    if start is None:
        start = topics.start_offsets(topic, [DECISIONS])[DECISIONS]
    items: list[DecisionRecord | Unreadable] = []
    settings = topics.config.confluent()
    with explained(settings, f"reading {topic}"):
        messages = read_range(
            settings, topic, DECISIONS, start, end, "read_committed",
            lambda first, after: items.append(Unreadable(first, after)),
        )  # fmt: skip
        for message in messages:
            digest = dict(message.headers() or []).get(DIGEST_HEADER)
            items.append(DecisionRecord(message.key(), message.value(), digest if isinstance(digest, bytes) else None))
    return LogRead(start, tuple(items))


class LogFollower:
    """Reads the decision log of *pipeline* repeatedly, each time only its new records. Fences nobody."""

    def __init__(self, config: ClientConfig, pipeline: str) -> None:
        self._pipeline, self._topic = pipeline, checkpoint_topic(pipeline)
        self._topics = Topics(config, timeout_ms=TIMEOUT_MS)
        self.topic: TopicInfo | None = None
        """Of the last look."""
        self._end = 0
        self._history = History(pipeline)

    def look(self) -> History:
        """The decisions so far: none without a topic; of the new topic where it was made anew.

        Raises `BrokerUnavailable` within seconds; the next look goes on from the one before. The first look connects.
        """
        topic = describe(self._topics, self._topic)
        if topic is None:
            return History(self._pipeline)
        try:
            return self._read(topic)
        except (Halt, TopicError, BrokerUnavailable):
            if describe(self._topics, self._topic) == topic:
                raise
            return History(self._pipeline)

    def has_news(self) -> bool:
        """Whether the topic of the last look has more decisions. False also if that cannot be asked: a look tells."""
        try:
            return self.topic is not None and stable_end(self._topics, self._topic) != self._end
        except (BrokerUnavailable, TopicError):
            return False

    def close(self) -> None:
        self._topics.close()

    def _read(self, topic: TopicInfo) -> History:
        """The decisions in *topic*. It raises one of several errors if the topic is deleted meanwhile."""
        end = stable_end(self._topics, self._topic)
        if topic != self.topic:
            read = read_log(self._topics, self._topic, end)
            self._history = history_of(self._pipeline, self._topic, read)
        elif end > self._end:
            take_in(self._history, read_log(self._topics, self._topic, end, self._end))
        self.topic, self._end = topic, end
        return self._history


def read_topic(config: ClientConfig, pipeline: str) -> tuple[TopicInfo, History]:
    """The checkpoint topic of *pipeline* and the decisions in it: of the same topic, though it may be deleted and made
    anew meanwhile; see `read_history`."""
    with closing(Topics(config, timeout_ms=TIMEOUT_MS)) as topics:
        return topic_with_history(topics, pipeline)


def topic_with_history(topics: Topics, pipeline: str) -> tuple[TopicInfo, History]:
    """As `read_topic`, over the connections of *topics*."""
    while True:
        topic = found(topics, pipeline)
        history = _history(topics, topic.name, pipeline)
        if found(topics, pipeline).topic_id == topic.topic_id:
            return topic, history


def read_history(config: ClientConfig, pipeline: str) -> History:
    """The decisions of *pipeline* so far, without taking part: it fences nobody."""
    with closing(Topics(config, timeout_ms=TIMEOUT_MS)) as topics:
        return _history(topics, found(topics, pipeline).name, pipeline)


def _history(topics: Topics, topic: str, pipeline: str) -> History:
    offsets = topics.log_offsets(topic, [DECISIONS])
    read = read_log(topics, topic, offsets.stable[DECISIONS], offsets.first[DECISIONS])
    return history_of(pipeline, topic, read)
