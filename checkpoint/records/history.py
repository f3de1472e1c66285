"""The history of a pipeline: the decisions of all its incarnations, from partition 0 of the checkpoint topic.

`History` is a fold over the records in the order of their offsets. Completed checkpoint ids only grow, there is one
manifest per id, and at most the newest manifest is not finalized; `admit` and `forget` raise `InvariantViolation`
before a record that breaks this could be written. Damaged records are kept in `damaged` by key, never skipped:
`halt_if_damaged` raises if recovery needs one of them.

The parts of a manifest come before it in its transaction. Compaction may have removed them from a log whose later
tombstones are still to come, so a manifest without one of its parts is damaged only until its own tombstone.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from exactlyonce.checkpoint.records.encoding import DamagedRecord, Decision, DecisionKey, ManifestPart, decode
from exactlyonce.checkpoint.records.manifest import Finalized, Incarnation, Manifest, Repair, named_by
from exactlyonce.checkpoint.records.storage_url import TOPIC
from exactlyonce.pipeline.errors import Halt, require

SILENCE_MS = 30_000
"""A living incarnation writes a heartbeat every ten seconds."""


class History:
    """The incarnations, manifests, finalized marks and repairs of one pipeline that are not tombstoned."""

    def __init__(self, pipeline: str) -> None:
        self.pipeline = pipeline
        self.incarnations: dict[int, Incarnation] = {}
        self.manifests: dict[int, Manifest] = {}
        self.finalized: dict[int, Finalized] = {}
        self.repairs: dict[int, dict[int, Repair]] = {}
        self.parts: dict[int, tuple[int, ...]] = {}
        """The numbers of the parts of manifests, by checkpoint."""
        self.damaged: dict[str, str] = {}
        """The reasons why records cannot be trusted, by key."""
        self.incarnation_latest = 0
        """The highest incarnation ever; 0 before the first one."""
        self.checkpoint_latest = -1
        """The highest checkpoint ever decided, readable or not; -1 before manifest 0."""
        self._seen: dict[int, bytes] = {}
        self._parts_seen = defaultdict[int, list[bytes]](list)
        """Their values, by checkpoint; a tombstone does not matter, for the manifest names their digests."""
        self._hiding: dict[str, None] = {}
        """Damaged places in the log with no newer manifest after them: they may hide one."""

    def copy(self) -> History:
        """The same history, to which `admit` and `forget` can be applied on trial."""
        other = History(self.pipeline)
        for name, value in vars(self).items():
            setattr(other, name, value.copy() if isinstance(value, dict) else value)
        other.repairs = {checkpoint: dict(repairs) for checkpoint, repairs in self.repairs.items()}
        return other

    @property
    def latest(self) -> Manifest | None:
        """The newest manifest."""
        return self.manifests[max(self.manifests)] if self.manifests else None

    @property
    def unfinalized(self) -> Manifest | None:
        """The newest manifest, if its committables may not all be committed yet."""
        latest = self.latest
        return latest if latest and latest.checkpoint not in self.finalized else None

    @property
    def latest_finalized(self) -> Manifest | None:
        """The newest manifest with all of its committables committed."""
        unfinalized = self.unfinalized
        return self.latest if unfinalized is None else self.manifests.get(unfinalized.previous)

    @property
    def retained(self) -> list[Manifest]:
        """All manifests, oldest first."""
        return [self.manifests[checkpoint] for checkpoint in sorted(self.manifests)]

    @property
    def savepoints(self) -> dict[int, Manifest]:
        """The savepoints, by number, oldest first."""
        return {manifest.checkpoint: manifest for manifest in self.retained if manifest.is_savepoint}

    @property
    def storage(self) -> str:
        """The storage of the newest manifest; see `Manifest.storage`."""
        return self.latest.storage if self.latest is not None else TOPIC

    @property
    def storages(self) -> list[str]:
        """All storages that may have blocks: of manifests, and of the last incarnations."""
        named = {manifest.storage for manifest in self.manifests.values()}
        return sorted(named.union(incarnation.storage for incarnation in self.incarnations.values()))

    @property
    def newest_incarnation(self) -> Incarnation | None:
        """The newest incarnation that can be read, with its last heartbeat."""
        return self.incarnations[max(self.incarnations)] if self.incarnations else None

    def living(self, now_ms: int) -> Incarnation | None:
        """The newest incarnation, unless it has ended cleanly or writes no heartbeats any more.

        Safety never rests on this. It keeps people from stopping a running pipeline by accident.
        """
        newest = self.newest_incarnation
        return None if newest is None or newest.ended or now_ms - newest.heartbeat_ms >= SILENCE_MS else newest

    @property
    def condemned(self) -> bool:
        """See `Incarnation.condemned`."""
        newest = self.newest_incarnation
        return newest is not None and newest.condemned

    def repairs_of(self, checkpoint: int) -> list[Repair]:
        """The repairs of *checkpoint*, oldest first; the last one of a committable counts."""
        return [repair for _, repair in sorted(self.repairs.get(checkpoint, {}).items())]

    def keys_of(self, checkpoint: int) -> list[DecisionKey]:
        """The keys that are tombstoned together when *checkpoint* is dropped."""
        parts = [DecisionKey(ManifestPart, checkpoint, number) for number in self.parts.get(checkpoint, ())]
        repairs = [DecisionKey(Repair, checkpoint, number) for number in sorted(self.repairs.get(checkpoint, {}))]
        return [DecisionKey(Manifest, checkpoint), *parts, DecisionKey(Finalized, checkpoint), *repairs]

    def references(self) -> set[str]:
        """The keys of all blocks that the manifests name."""
        return {ref.key for manifest in self.manifests.values() for ref in named_by(manifest)}

    def damaged_checkpoints(self) -> list[int]:
        """The checkpoints older than the newest manifest whose manifests cannot be read, in order."""
        keys = filter(None, map(DecisionKey.parse, self.damaged))
        newest = max(self.manifests, default=-1)
        return sorted(key.number for key in keys if key.kind is Manifest and key.number < newest)

    def halt_if_damaged(self) -> None:
        """Raise `Halt` if damage hides the newest decision; damage below it only costs an older checkpoint.

        The output of a checkpoint with an unreadable manifest may be visible: an older one would emit it again.
        """
        newest = self.latest.checkpoint if self.latest else -1
        fatal = [text for text in sorted(self.damaged) if self._hides_decision(text, newest)]
        if fatal:
            damage = "; ".join(f"{text}: {self.damaged[text]}" for text in fatal)
            raise Halt(
                f"The checkpoint topic of {self.pipeline} is damaged ({damage}). The output of that checkpoint may be "
                f"visible, so going on from an older one could emit it again. Restore the topic from a replica or "
                f"backup, or `exactlyonce reset {self.pipeline}` and recompute from the input into new output topics."
            )

    def _hides_decision(self, text: str, newest: int) -> bool:
        key = DecisionKey.parse(text)
        if key is None:
            return text in self._hiding  # else it is not ours: somebody else wrote to the topic
        if key.kind is Manifest:
            return key.number >= newest
        return key.kind is Repair and key.number == newest and self.unfinalized is not None

    # --- reading

    def read(self, key: bytes | None, value: bytes | None, digest: bytes | None) -> None:
        """Take in the next record of partition 0; *digest* is the SHA-256 that was written beside the value."""
        text = (key or b"").decode(errors="backslashreplace")
        parsed = DecisionKey.parse(text)
        if parsed is None:
            self.damaged[text] = "this key is none of exactlyonce's"
            return
        self._count(parsed)
        self._discard(parsed)
        if value is None:
            return
        try:
            if parsed.kind is ManifestPart:
                self._add_parts([parsed])
                _checked(parsed, value, digest)
                self._parts_seen[parsed.number].append(value)
                return
            record = _checked(parsed, value, digest, tuple(self._parts_seen.get(parsed.number, ())))
            if isinstance(record, Manifest) and self._seen.setdefault(record.checkpoint, value) != value:
                raise DamagedRecord(f"There are two different manifests of checkpoint {record.checkpoint}.")
            self._keep(record)
        except DamagedRecord as error:
            self.damaged[text] = str(error)

    def skip(self, first: int, behind: int) -> None:
        """The records from offset *first* up to, not including, *behind* are in a damaged batch.

        A newer manifest after them shows that the newest is not among them; then at most older checkpoints are lost.
        """
        place = f"offsets {first} to {behind - 1} of the decision log"
        self.damaged[place] = "their bytes are not those that were written"
        self._hiding[place] = None

    def finish_reading(self) -> None:
        """Note missing manifests, once the last record has been taken in."""
        self._seen.clear()
        self._parts_seen.clear()
        for checkpoint in self.finalized.keys() - self.manifests.keys():
            self.damaged.setdefault(f"manifest/{checkpoint}", "it is finalized, but its manifest is gone")

    def _keep(self, record: Decision) -> None:
        if isinstance(record, Manifest):
            if self._hiding and record.checkpoint > max(self.manifests, default=-1):
                self._hiding.clear()
            self.manifests[record.checkpoint] = record
        elif isinstance(record, Finalized):
            self.finalized[record.checkpoint] = record
        elif isinstance(record, Repair):
            self.repairs.setdefault(record.checkpoint, {})[record.number] = record
        else:
            self.incarnations[record.incarnation] = record
        self.incarnation_latest = max(self.incarnation_latest, record.incarnation)  # its first record may be damaged
        self._count(DecisionKey.of(record))

    def _add_parts(self, keys: Iterable[DecisionKey]) -> None:
        for key in keys:
            self.parts[key.number] = (*self.parts.get(key.number, ()), key.ordinal)

    def _count(self, key: DecisionKey) -> None:
        if key.kind is Incarnation:
            self.incarnation_latest = max(self.incarnation_latest, key.number)
        else:
            self.checkpoint_latest = max(self.checkpoint_latest, key.number)

    def _discard(self, key: DecisionKey) -> None:
        self.damaged.pop(str(key), None)
        if key.kind is Repair:
            self.repairs.get(key.number, {}).pop(key.ordinal, None)
        elif key.kind is ManifestPart:
            left = tuple(number for number in self.parts.pop(key.number, ()) if number != key.ordinal)
            self.parts.update({key.number: left} if left else {})
        elif key.kind is Incarnation:
            self.incarnations.pop(key.number, None)
        elif key.kind is Manifest:
            self.manifests.pop(key.number, None)
        else:
            self.finalized.pop(key.number, None)

    # --- writing

    def admit(self, record: Decision, parts: Sequence[DecisionKey] = ()) -> None:
        """Add *record*, which is about to be written; raise `InvariantViolation` if it must not be.

        *parts* are the keys of a manifest's parts.
        """
        if isinstance(record, Manifest):
            self._require_next(record)
        elif isinstance(record, Finalized):
            self._require_finalizable(record)
        elif isinstance(record, Repair):
            unfinalized = self.unfinalized
            require(
                unfinalized is not None and unfinalized.checkpoint == record.checkpoint,
                f"A repair must stand for the unfinalized checkpoint, not for {record.checkpoint}",
            )
            require(
                record.number not in self.repairs.get(record.checkpoint, {}),
                f"repair/{record.checkpoint}/{record.number} is written already",
            )
        self._keep(record)
        self._add_parts(parts)

    def forget(self, keys: Iterable[DecisionKey]) -> None:
        """Drop *keys*, which are about to be tombstoned; raise `InvariantViolation` if one is still needed."""
        keys = list(keys)
        for key in keys:
            if key.kind is Incarnation:
                require(key.number < self.incarnation_latest, "The newest incarnation must not be tombstoned")
            else:
                require(key.number < self.checkpoint_latest, "The newest checkpoint must not be tombstoned")
                together = set(map(str, self.keys_of(key.number))) <= set(map(str, keys))
                require(together, f"All records of checkpoint {key.number} must be tombstoned in one transaction")
        for key in keys:
            self._discard(key)

    def _require_next(self, manifest: Manifest) -> None:
        require(manifest.pipeline == self.pipeline, f"A manifest of {manifest.pipeline} belongs into its own topic")
        require(
            manifest.checkpoint > self.checkpoint_latest,
            f"Checkpoint ids only grow: {manifest.checkpoint} after {self.checkpoint_latest}",
        )
        require(self.unfinalized is None, f"Checkpoint {self.checkpoint_latest} must be finalized before the next")

    def _require_finalizable(self, mark: Finalized) -> None:
        manifest = self.unfinalized
        require(
            manifest is not None and manifest.checkpoint == mark.checkpoint,
            f"Only the newest, unfinalized checkpoint can be finalized, not {mark.checkpoint}",
        )
        decided = manifest.decided if manifest else set()
        missing = sorted(decided - {name for name, _ in mark.fates})
        require(not missing, f"Checkpoint {mark.checkpoint} cannot be final: the fate of {missing} is open")


def _checked(key: DecisionKey, value: bytes, digest: bytes | None, parts: tuple[bytes, ...] = ()) -> Any:
    """The record under *key*; *parts* are the values of the parts that a manifest may have."""
    if digest is None:
        raise DamagedRecord("The SHA-256 beside the value is missing: exactlyonce did not write this.")
    if hashlib.sha256(value).digest() != digest:
        raise DamagedRecord("The value does not have the SHA-256 that was written beside it.")
    record = decode(value, key.kind, parts)
    if DecisionKey.of(record) != key:
        raise DamagedRecord(f"The value belongs to {DecisionKey.of(record)}.")
    return record
