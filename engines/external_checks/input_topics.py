"""The topics that sources read, each asked for at the cluster that has it.

Invariants: answers name a topic by its place, so topics of one name in two clusters are told apart; a cluster is
connected to when it is first asked. For one thread at a time.
"""

from __future__ import annotations

from collections.abc import Iterable

from exactlyonce.connectors.kafka.topics import Topic, Topics
from exactlyonce.connectors.source import ReadsTopic
from exactlyonce.pipeline.errors import TopicError

Seen = dict[str, tuple[Topic | None, ...]]
"""By place, the state of a topic as each live broker knows it; see `Topics.seen_by_each`."""


class InputTopics:
    """See the module. *own* asks the cluster of the checkpoints, and stays with the caller, who may use it here."""

    def __init__(self, own: Topics) -> None:
        self.own = own
        self._others: dict[tuple[tuple[str, str], ...], Topics] = {}
        """By the settings of the cluster."""

    def of(self, source: ReadsTopic) -> Topics:
        """The questions to the cluster of *source*. Raises `ConfigError` for settings that a client refuses."""
        if source.client is None:
            return self.own
        settings = tuple(sorted(source.client.as_text.items()))
        if settings not in self._others:
            source.client.check()
            self._others[settings] = Topics(source.client)
        return self._others[settings]

    def describe(self, sources: Iterable[ReadsTopic]) -> dict[str, Topic]:
        """The topic of each of *sources*. Raises `TopicError`, which names all that are missing."""
        described: dict[str, Topic] = {}
        missing: list[str] = []
        for topics, here in self.by_cluster(sources):
            try:
                found = topics.describe(sorted(source.topic for source in here))
            except TopicError as error:
                missing.append(str(error))
            else:
                described |= {source.place: found[source.topic] for source in here}
        if missing:
            raise TopicError("\n".join(missing))
        return described

    def seen_by_each(self, sources: Iterable[ReadsTopic], timeout_ms: int) -> Seen:
        """The topic of each of *sources*, as every live broker of its cluster knows it now."""
        seen: Seen = {}
        for topics, here in self.by_cluster(sources):
            views = topics.seen_by_each(sorted(source.topic for source in here), timeout_ms)
            seen |= {source.place: views[source.topic] for source in here}
        return seen

    def by_cluster(self, sources: Iterable[ReadsTopic]) -> Iterable[tuple[Topics, list[ReadsTopic]]]:
        """The questions to each cluster, and the *sources* that read there."""
        clusters: dict[int, tuple[Topics, list[ReadsTopic]]] = {}
        for source in sources:
            topics = self.of(source)
            clusters.setdefault(id(topics), (topics, []))[1].append(source)
        return clusters.values()

    def close(self) -> None:
        """Close the connections to other clusters."""
        for topics in self._others.values():
            topics.close()
