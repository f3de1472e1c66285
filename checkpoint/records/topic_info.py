"""The checkpoint topic of a pipeline, as data."""

from __future__ import annotations

import msgspec


class TopicInfo(msgspec.Struct, frozen=True):
    """The checkpoint topic of a pipeline."""

    name: str
    topic_id: str
    partitions: int
    replicas: int

    def partition_of(self, key_group: int) -> int:
        """The partition for blocks of *key_group*: any but 0, which holds the decisions.

        >>> TopicInfo("totals.checkpoints", "", partitions=5, replicas=1).partition_of(7)
        4
        """
        return 1 + key_group % (self.partitions - 1)
