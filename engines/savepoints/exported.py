"""An exported savepoint: a folder of Avro container files, and the file that makes them a savepoint.

    <pipeline>-<checkpoint>-<random>/
        <operator>-<number>.avro    key_group, key (canonical), state (msgpack) and, if it is timed, slot (in ms); one
                                    version, by key group across files
        <loop>-<number>.avro        subtask, record (msgpack), and its origin's topic, partition, offset
        _metadata.json              {"format": 1, "saved": the description, with all files, "sha256": of that}
        _removed.json               {"pipeline": ..., "checkpoint": ...}: a removal is under way

Invariants: `_metadata.json` is written last, with the size and SHA-256 of every file and its own SHA-256, so that a
partial export is no savepoint and no changed byte goes unnoticed; a name is written once. A removal writes
`_removed.json`, then removes `_metadata.json`, so that a later one can finish it. On a full disk it removes
`_metadata.json` last instead, and the empty folder is known by its name. Format 2 has records of loops, format 3
has slots, so that no older version drops them.
"""

from __future__ import annotations

import hashlib
import io
import re
import secrets
from collections.abc import Iterator
from contextlib import suppress
from heapq import merge
from itertools import chain, groupby, islice
from operator import attrgetter
from typing import Any

import msgspec
from fastavro import parse_schema, reader, writer

from exactlyonce.checkpoint.records.storage_url import parts_of, storage_url
from exactlyonce.connectors.filestore.store import AWAY_TIMEOUT_S, FileStore, Retries, store_at
from exactlyonce.engines.savepoints.contents import (
    KeptEntry,
    LoopEntry,
    Saved,
    SavedFile,
    SavedLoop,
    SavedOperator,
    Savepoint,
    portions,
)
from exactlyonce.pipeline.errors import ConfigError, ExactlyOnceError, Halt, StorageUnavailable
from exactlyonce.pipeline.failpoints import hit
from exactlyonce.pipeline.keys import key_forms_of

METADATA = "_metadata.json"
REMOVED = "_removed.json"
FORMAT = 3
_WITH_LOOPS, _PLAIN = 2, 1
_PART = re.compile(r".+-\d+\.avro|aside-[0-9a-f]{16}|probe(-\d+)?(-[0-9a-f]{8})?", re.ASCII)
"""Names of files that an export writes before `_metadata.json`, with temporary ones and probes of the folder."""
_NAME = re.compile(r"(.+)-(\d+)-[0-9a-f]{8}", re.ASCII)
"""The name of a savepoint's folder: pipeline, checkpoint and random digits."""
FILE_BYTES = 16 * 1024 * 1024
"""The approximate size of keys and states in one file, which is made and read as a whole."""
FILE_RECORDS = 50_000
"""Entries of one file: each takes some 500 bytes of memory beside its own."""


def _record(name: str, *fields: dict[str, str]) -> Any:
    return parse_schema({"type": "record", "name": name, "namespace": "exactlyonce", "fields": [*fields]})


_STATE = (
    {"name": "key_group", "type": "int"},
    {"name": "key", "type": "bytes", "doc": "msgpack, canonical"},
    {"name": "state", "type": "bytes", "doc": "msgpack"},
)
_STATES = _record("State", *_STATE)
_TIMED_STATES = _record("TimedState", *_STATE, {"name": "slot", "type": "long", "doc": "in ms since 1970"})
_LOOP_RECORDS = _record(
    "GoingRound",
    {"name": "subtask", "type": "int"},
    {"name": "record", "type": "bytes", "doc": "msgpack"},
    {"name": "topic", "type": "string", "doc": "of the message that it stems from"},
    {"name": "partition", "type": "int"},
    {"name": "offset", "type": "long"},
)


class DamagedSavepoint(Halt):
    """A file of an exported savepoint is missing or has changed."""


class DeletedSavepoint(ConfigError):
    """An exported savepoint is deleted, or is being deleted, while it is read."""


class _Metadata(msgspec.Struct, frozen=True):
    format: int
    saved: msgspec.Raw
    sha256: str


class _Removed(msgspec.Struct, frozen=True):
    pipeline: str
    checkpoint: int


def require_place(url: str) -> None:
    """Raise unless a savepoint can be exported below *url*. No file is left there, if removal is allowed."""
    folder = store_at(storage_url(url), f"place-{secrets.token_hex(4)}", makes_root=True)
    folder.check()
    with suppress(ExactlyOnceError):
        _empty(folder)


def export(savepoint: Savepoint, url: str) -> str:
    """Write *savepoint* into a new folder below *url*, which is created if it is missing; the URL of the new folder,
    once all of it is durable."""
    saved, base = savepoint.saved, storage_url(url)
    name = f"{saved.pipeline}-{saved.checkpoint}-{secrets.token_hex(4)}"
    folder = store_at(base, name, makes_root=True)
    folder.check()
    try:
        whole = msgspec.structs.replace(
            saved,
            operators=tuple(_exported(savepoint, operator, folder) for operator in saved.operators),
            loops=tuple(_exported_loop(savepoint, loop, folder) for loop in saved.loops),
        )
        encoded = msgspec.json.encode(whole)
        document = _Metadata(_format_of(whole), msgspec.Raw(encoded), hashlib.sha256(encoded).hexdigest())
        _put_persistently(folder, METADATA, msgspec.json.encode(document))
        present = Retries(AWAY_TIMEOUT_S)(lambda: {file.name for file in folder.files()})
        if REMOVED in present or not {file.name for file in _files_of(whole)} <= present:
            raise DeletedSavepoint(f"{base}/{name} was deleted while the export was under way. Export it again.")
    except (ExactlyOnceError, KeyboardInterrupt):
        with suppress(ExactlyOnceError):  # a partial export is useless, and may have filled the disk
            folder.remove([METADATA])  # it may exist though putting it has failed
            _empty(folder)
        raise
    return f"{base}/{name}"


def _format_of(saved: Saved) -> int:
    if any(operator.times is not None for operator in saved.operators):
        return FORMAT
    return _WITH_LOOPS if saved.loops else _PLAIN


def _files_of(saved: Saved) -> list[SavedFile]:
    parts: tuple[SavedOperator | SavedLoop, ...] = (*saved.operators, *saved.loops)
    return [file for part in parts for file in part.files]


def _exported(savepoint: Savepoint, operator: SavedOperator, folder: FileStore) -> SavedOperator:
    files: list[SavedFile] = []
    key_forms = 0
    for entries in portions(savepoint.entries(operator.operator), FILE_BYTES, FILE_RECORDS, by_version=True):
        version = entries[0].version
        metadata = {
            "exactlyonce.operator": operator.operator,
            "exactlyonce.state_version": str(version),
        }
        if version == operator.version:  # schemas of older versions are not kept
            metadata["exactlyonce.state_schema"] = msgspec.json.encode(operator.schema).decode()
        key_forms |= key_forms_of(entry.key for entry in entries)
        records = [
            {"key_group": entry.group, "key": entry.key, "state": entry.state, "slot": entry.slot} for entry in entries
        ]
        schema = _STATES if operator.times is None else _TIMED_STATES
        files.append(_put(folder, f"{operator.operator}-{len(files)}.avro", schema, records, metadata, version))
    return msgspec.structs.replace(operator, files=tuple(files), key_forms=key_forms)


def _exported_loop(savepoint: Savepoint, loop: SavedLoop, folder: FileStore) -> SavedLoop:
    files: list[SavedFile] = []
    entries = savepoint.loop_entries(loop.loop)
    while records := [entry._asdict() for entry in islice(entries, FILE_RECORDS)]:
        metadata = {"exactlyonce.loop": loop.loop}
        files.append(_put(folder, f"{loop.loop}-{len(files)}.avro", _LOOP_RECORDS, records, metadata, 1))
    return msgspec.structs.replace(loop, files=tuple(files))


def _put(
    folder: FileStore, name: str, schema: Any, records: list[dict[str, Any]], metadata: dict[str, str], version: int
) -> SavedFile:
    stream = io.BytesIO()
    writer(stream, schema, records, codec="deflate", metadata=metadata)
    content = stream.getvalue()
    _put_persistently(folder, name, content)
    return SavedFile(name, len(content), hashlib.sha256(content).hexdigest(), len(records), version)


def _put_persistently(folder: FileStore, name: str, content: bytes) -> None:
    Retries(AWAY_TIMEOUT_S)(lambda: folder.put(name, content, _temporary_name()))


def _temporary_name() -> str:
    return f"aside-{secrets.token_hex(8)}"


class ExportedSavepoint:
    """A `Savepoint` in a folder."""

    def __init__(self, url: str, folder: FileStore, saved: Saved, sha256: str) -> None:
        self._url, self._folder = url, folder
        self.saved, self._sha256 = saved, sha256

    @staticmethod
    def at(url: str) -> ExportedSavepoint:
        """The export at *url*. ConfigError where there is none, `DamagedSavepoint`."""
        url, folder = _place(url)
        content = folder.get(METADATA)
        if content is None and (begun := _removal(folder)) is not None:
            raise ConfigError(
                f"The savepoint at {url} was deleted, and that was broken off. `exactlyonce savepoints delete "
                f"{begun.pipeline} {url}` removes what is left."
            )
        if content is None and (below := _savepoints_in(folder)):
            raise ConfigError(
                f"There is no savepoint at {url} itself, but in folders of it: give the URL of one.\n"
                + "\n".join(f"  {url}/{name}" for name in below)
            )
        if content is None:
            raise ConfigError(
                f"There is no savepoint at {url}: it has no {METADATA}, which is written last. The export was not "
                f"finished, or the URL is not the one that `exactlyonce savepoint --to` printed. `exactlyonce "
                f"savepoints delete` removes what an export has left, where nothing else is in its folder."
            )
        return ExportedSavepoint(url, folder, *_decoded(url, content))

    @property
    def origin(self) -> str:
        return f"export {self._sha256}"

    @property
    def name(self) -> str:
        return f"savepoint {self.saved.checkpoint} of {self.saved.pipeline} at {self._url}"

    def entries(self, operator: str) -> Iterator[KeptEntry]:
        by_version = attrgetter("version")
        files = groupby(sorted(self.operator(operator).files, key=by_version), key=by_version)
        versions = [chain.from_iterable(map(self.read, [*same])) for _, same in files]
        return merge(*versions, key=attrgetter("group"))

    def loop_entries(self, loop: str) -> Iterator[LoopEntry]:
        for saved in self.saved.loops:
            for file in saved.files if saved.loop == loop else ():
                yield from (LoopEntry(**fields) for fields in self._records(file))

    def operator(self, operator: str) -> SavedOperator:
        """The state of *operator*; ConfigError, with the existing ones, if there is none."""
        for saved in self.saved.operators:
            if saved.operator == operator:
                return saved
        known = ", ".join(saved.operator for saved in self.saved.operators) or "none: the pipeline keeps no state"
        raise ConfigError(f"The {self.name} has no state of an operator {operator!r}. Its operators are: {known}.")

    def damage(self) -> list[str]:
        """The damage of all files; empty if every byte is as it was written."""
        problems = []
        for file in _files_of(self.saved):
            try:
                for _ in self._records(file):
                    pass
            except DeletedSavepoint:
                raise
            except (DamagedSavepoint, ConfigError) as error:  # a ConfigError for a missing permission, say
                problems.append(str(error))
        return problems

    @property
    def files(self) -> int:
        """The number of files, without `_metadata.json`."""
        return len(_files_of(self.saved))

    def read(self, file: SavedFile) -> Iterator[KeptEntry]:
        """The states in one of its files. Raises `DamagedSavepoint`."""
        for fields in self._records(file):
            yield KeptEntry(fields["key_group"], fields["key"], fields["state"], file.version, fields.get("slot"))

    def _records(self, file: SavedFile) -> Iterator[Any]:
        content = Retries(AWAY_TIMEOUT_S)(lambda: self._folder.get(file.name))
        if content is None:
            self._require_not_deleted()
            raise self._damaged(file.name, "it is missing")
        if len(content) != file.size:
            raise self._damaged(file.name, f"it has {len(content)} bytes, and was written with {file.size}")
        if hashlib.sha256(content).hexdigest() != file.sha256:
            raise self._damaged(file.name, "its bytes are not those that were written")
        count = 0
        for record in reader(io.BytesIO(content)):
            count += 1
            yield record
        if count != file.entries:
            raise self._damaged(file.name, f"it has {count} entries, and was written with {file.entries}")

    def _require_not_deleted(self) -> None:
        if _removal(self._folder) is not None or self._folder.get(METADATA) is None:
            raise DeletedSavepoint(
                f"The {self.name} is being deleted, or has been, by `exactlyonce savepoints delete`. What was read of "
                f"it was whole, and cannot be gone on with: use another savepoint."
            )

    def _damaged(self, name: str, why: str) -> DamagedSavepoint:
        return DamagedSavepoint(
            f"{self._url}/{name} is damaged: {why}. Nothing can be restored from this savepoint unless the file is put "
            f"back as it was: use a copy of it, or another savepoint."
        )


def remove(url: str, pipeline: str) -> int:
    """Remove the savepoint of *pipeline* at *url*, or leftovers of an export or a removal; return its checkpoint.

    ConfigError where there is none, or one of another pipeline; `DamagedSavepoint`.
    """
    url, folder = _place(url)
    begun, checkpoint = _removal(folder), _checkpoint_named(url, pipeline)
    if begun is None and checkpoint is not None:
        names = [file.name for file in folder.files()]
        if not names and folder.remove_folder():  # left by a removal that was broken off at its end
            return checkpoint
        if names and all(_PART.fullmatch(name) for name in names):  # left by an export that was killed
            begun = _Removed(pipeline, checkpoint)
    if begun is None:
        saved = ExportedSavepoint.at(url).saved
        begun = _Removed(saved.pipeline, saved.checkpoint)
    if begun.pipeline != pipeline:
        raise ConfigError(f"{url} is a savepoint of {begun.pipeline}, not of {pipeline}. Nothing was deleted.")
    try:
        folder.put(REMOVED, msgspec.json.encode(begun), _temporary_name())
    except StorageUnavailable:  # the disk may be full: this makes room
        _remove_all_but(folder, METADATA, REMOVED)
    folder.remove([METADATA])
    hit("savepoint-removing")
    _empty(folder)
    return begun.checkpoint


def _place(url: str) -> tuple[str, FileStore]:
    """*url* in its one spelling, and the folder there."""
    url = storage_url(url)
    base, _, name = url.rpartition("/")
    scheme, host, path = parts_of(url)
    if not path or not (host or scheme == "file"):
        raise ConfigError(f"{url} is no savepoint: give the URL that `exactlyonce savepoint --to` has printed.")
    return url, store_at(base, name)


def _removal(folder: FileStore) -> _Removed | None:
    """The removal from *folder* that is under way, if any."""
    content = folder.get(REMOVED)
    with suppress(msgspec.DecodeError, UnicodeDecodeError):  # then the file is not ours
        return msgspec.json.decode(content or b"", type=_Removed)
    return None


def _savepoints_in(folder: FileStore) -> list[str]:
    """The names of the folders in *folder* that are savepoints, the newest of each pipeline first."""
    with suppress(ExactlyOnceError):
        named = [match for name in folder.names_in("") if (match := _NAME.fullmatch(name))]
        newest_first = sorted(named, key=lambda match: (match[1], -int(match[2])))
        return [match[0] for match in newest_first if folder.look(f"{match[0]}/{METADATA}") is not None]
    return []


def _checkpoint_named(url: str, pipeline: str) -> int | None:
    """The checkpoint of *pipeline* in the name of *url*; None for another name."""
    named = _NAME.fullmatch(url.rpartition("/")[2])
    return int(named[2]) if named is not None and named[1] == pipeline else None


def _empty(folder: FileStore) -> None:
    _remove_all_but(folder, REMOVED)
    folder.remove([REMOVED])
    folder.remove_folder()


def _remove_all_but(folder: FileStore, *kept: str) -> None:
    folder.remove([file.name for file in folder.files() if file.name not in kept])


def _decoded(url: str, content: bytes) -> tuple[Saved, str]:
    with suppress(msgspec.DecodeError, UnicodeDecodeError):
        document = msgspec.json.decode(content, type=_Metadata)
        digest = hashlib.sha256(bytes(document.saved)).hexdigest()
        if document.format > FORMAT:
            raise ConfigError(f"The savepoint at {url} was written by a newer exactlyonce. Restore it with that.")
        saved = msgspec.json.decode(document.saved, type=Saved)
        if content == msgspec.json.encode(_Metadata(_format_of(saved), document.saved, digest)):
            return saved, digest
    raise DamagedSavepoint(
        f"{url}/{METADATA} is damaged: its bytes are not those that were written. Nothing can be restored from this "
        f"savepoint unless the file is put back as it was: use a copy of it, or another savepoint."
    )
