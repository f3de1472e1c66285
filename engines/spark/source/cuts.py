"""The part of a topic that belongs to a checkpoint of a pipeline: input up to Sn, output of it and those before.

Invariants: the checkpoint is chosen once, and its output is committed as a whole, below the ends of the topics. These
are asked for before the writers of later checkpoints, so that a transaction that was committed below them is known as a
later one, or is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_history
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.engines.bounded.audit.attribution import claims_of
from exactlyonce.engines.bounded.unit.visible_lanes import Claim
from exactlyonce.engines.savepoints.retained import chosen_checkpoint
from exactlyonce.engines.spark.source.ranges import LaterOutput, Range, TopicContents, require_same_topic
from exactlyonce.engines.spark.source.read_options import CutOptions
from exactlyonce.pipeline.errors import ConfigError


class Cut:
    """A checkpoint of a pipeline. Made before the topics are looked at."""

    def __init__(self, config: ClientConfig, options: CutOptions) -> None:
        self._config, self._pipeline = config, options.pipeline
        history = read_history(config, options.pipeline)
        self._manifest = self._chosen(history, options)
        self._inputs = {read.topic for read in self._manifest.in_cluster}
        self._outputs = {output.topic for output in self._manifest.sinks}

    def _chosen(self, history: History, options: CutOptions) -> Manifest:
        newest_whole = max(history.finalized, default=None)
        if options.checkpoint is None and options.moment is None and newest_whole in history.manifests:
            return history.manifests[newest_whole]
        manifest = chosen_checkpoint(history, options.checkpoint, options.moment)
        if manifest.checkpoint not in history.finalized:
            raise ConfigError(
                f"Checkpoint {manifest.checkpoint} of {history.pipeline} is decided, and its output is not all "
                f"committed yet: try again, or name an older one."
            )
        return manifest

    def ranges(self, wanted: Sequence[Range], now: Mapping[str, TopicContents], topics: Topics) -> list[Range]:
        """The parts of *wanted*, which are of the topics *now*, that belong to the checkpoint."""
        outputs = sorted({range_.topic for range_ in wanted} & self._outputs)
        ends = {name: topics.end_offsets(name, committed=False) for name in outputs}
        later = self._later_claims() if outputs else []  # after the ends: a commit below them is known
        return [
            self._output(range_, now[range_.topic], ends[range_.topic][range_.partition], later)
            if range_.topic in self._outputs
            else self._input(range_, now[range_.topic])
            for range_ in wanted
        ]

    def require_known(self, names: Sequence[str]) -> None:
        """Raise ConfigError for a topic that the pipeline does not have, or both reads and writes."""
        for name in names:
            if name in self._inputs and name in self._outputs:
                raise ConfigError(f"{self._pipeline} reads {name!r} and writes to it: no part is of one checkpoint.")
            if name not in self._inputs | self._outputs:
                raise ConfigError(
                    f"{self._pipeline} has no topic {name!r} at checkpoint {self._manifest.checkpoint}. It reads "
                    f"{', '.join(sorted(self._inputs)) or 'none'}, and writes exactly once to "
                    f"{', '.join(sorted(self._outputs)) or 'none'}."
                )

    def _input(self, wanted: Range, topic: TopicContents) -> Range:
        """*wanted* up to Sn; a partition that was added later has nothing."""
        own = [read for read in self._manifest.in_cluster if read.topic == wanted.topic]
        require_same_topic(topic, own[0].topic_id)
        end = max((read.offset for read in own if read.partition == wanted.partition), default=0)
        return replace(wanted, end=max(wanted.start, end))

    def _output(self, wanted: Range, topic: TopicContents, log_end: int, later: Sequence[Claim]) -> Range:
        """*wanted*, to the end of the log, with the writers after the cut.

        They have no record before their first one, before the stable end, and before the log's own beginning.
        """
        own = [claim for claim in later if claim.place == (wanted.topic, wanted.partition)]
        first = max(topic.first[wanted.partition], min([wanted.end, *(claim.first_offset for claim in own)]))
        writers = frozenset(claim.writer for claim in own)
        return replace(wanted, end=max(log_end, wanted.start), later=LaterOutput(first, writers, log_end))

    def _later_claims(self) -> list[Claim]:
        """The transactions of all later checkpoints."""
        history, number = read_history(self._config, self._pipeline), self._manifest.checkpoint
        later = [manifest for manifest in history.retained if manifest.checkpoint > number]
        before = number
        for manifest in later:
            if manifest.previous != before:
                raise ConfigError(
                    f"Checkpoints between {before} and {manifest.checkpoint} of {self._pipeline} have expired: which "
                    f"records they have written is not known any more, so its output at checkpoint {number} is not, "
                    f"either. Name checkpoint {manifest.checkpoint} or a later one, or read its input alone."
                )
            before = manifest.checkpoint
        return [claim for manifest in later for claim in claims_of(history, manifest)]
