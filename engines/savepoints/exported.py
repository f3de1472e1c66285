"""An exported savepoint: a folder of Avro container files, and the file that makes them a savepoint.

    <pipeline>-<checkpoint>-<random>/
        <operator>-<number>.avro    records of key_group, key (canonical), state (msgpack); all of one version, by key
                                    group, and those of a version likewise from file to file
        <loop>-<number>.avro        records of subtask, record (msgpack), and its origin's topic, partition, offset
        _metadata.json              {"format": 1, "saved": what it says of itself, with all files, "sha256": of that}
        _removed.json               {"pipeline": ..., "checkpoint": ...}: it is being removed

Invariants: `_metadata.json` is written last, and has the size and SHA-256 of every file, and the SHA-256 of all this,
so that a part of an export is never taken for one and no changed byte goes unnoticed; such a part is removed, as far as
what broke it off allows, or by whoever deletes it, and an export that lost a file to that is no savepoint either; a
name is written once; a removal says first that it has begun, and then takes `_metadata.json`, so that whoever comes
later can end it; one that finds no room to say so takes `_metadata.json` last, for the same reason, and the empty
folder is known by its name; no committable is in it. Where something goes round a loop, its format is 2, so that nobody
leaves that behind who does not know of it.
"""

from __future__ import annotations

import hashlib
import io
import re
import secrets
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from heapq import merge
from itertools import chain, groupby, islice
from operator import attrgetter
from typing import Any

import msgspec
from fastavro import parse_schema, reader, writer

from exactlyonce.checkpoint.records.storage_url import parts_of, storage_url
from exactlyonce.connectors.blocks.folder import Folder
from exactlyonce.connectors.blocks.storage import AWAY_TIMEOUT_S, folder_of, persistently
from exactlyonce.engines.savepoints.contents import Saved, SavedFile, SavedLoop, SavedOperator, Savepoint
from exactlyonce.engines.savepoints.kept_state import KeptEntry, portions
from exactlyonce.engines.savepoints.loops import LoopEntry
from exactlyonce.pipeline.errors import ConfigError, ExactlyOnceError, Halt, StorageUnavailable
from exactlyonce.pipeline.failpoints import hit
from exactlyonce.pipeline.key_types import forms_of

METADATA = "_metadata.json"
REMOVED = "_removed.json"
FORMAT = 2
"""The newest that is known."""
_WITHOUT_LOOPS = 1
_PART = re.compile(r".+-\d+\.avro|aside-[0-9a-f]{16}|probe(-\d+)?(-[0-9a-f]{8})?", re.ASCII)
"""What an export writes before `_metadata.json`: its files, what becomes one by its name, and what tries the folder."""
FILE_BYTES = 16 * 1024 * 1024
"""Of keys and states in one file, about: a file is made and read as a whole."""
FILE_RECORDS = 50_000
"""In one file: in memory each takes some 500 bytes beside its own, and many keys and states have but a few."""


def _record(name: str, *fields: dict[str, str]) -> Any:
    return parse_schema({"type": "record", "name": name, "namespace": "exactlyonce", "fields": [*fields]})


_STATES = _record(
    "State",
    {"name": "key_group", "type": "int"},
    {"name": "key", "type": "bytes", "doc": "msgpack, canonical"},
    {"name": "state", "type": "bytes", "doc": "msgpack"},
)
_GOING_ROUND = _record(
    "GoingRound",
    {"name": "subtask", "type": "int"},
    {"name": "record", "type": "bytes", "doc": "msgpack"},
    {"name": "topic", "type": "string", "doc": "of the message that it stems from"},
    {"name": "partition", "type": "int"},
    {"name": "offset", "type": "long"},
)


class DamagedSavepoint(Halt):
    """A file of an exported savepoint is missing, or is not what was written."""


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
    """Raise unless a savepoint can be exported below *url*. Nothing is left there, if things may be removed."""
    folder = folder_of(storage_url(url), f"place-{secrets.token_hex(4)}")
    folder.check()
    with suppress(ExactlyOnceError):
        _empty(folder)


def export(savepoint: Savepoint, url: str) -> str:
    """Write *savepoint* into a new folder below *url*; the URL of that folder, once all of it is durable."""
    saved, base = savepoint.saved, storage_url(url)
    name = f"{saved.pipeline}-{saved.checkpoint}-{secrets.token_hex(4)}"
    folder = folder_of(base, name)
    folder.check()
    try:
        operators = tuple(_exported(savepoint, each, folder) for each in saved.operators)
        loops = tuple(_exported_loop(savepoint, each, folder) for each in saved.loops)
        whole = msgspec.json.encode(msgspec.structs.replace(saved, operators=operators, loops=loops))
        document = _Metadata(_format_of(loops), msgspec.Raw(whole), hashlib.sha256(whole).hexdigest())
        _put_persistently(folder, METADATA, msgspec.json.encode(document))
        _require_untouched(f"{base}/{name}", folder, {each.name for each in _files_of(operators, loops)})
    except (ExactlyOnceError, KeyboardInterrupt):
        with suppress(ExactlyOnceError):  # a part of one is nobody's, and may be what has filled the disk
            folder.remove([METADATA])  # it may be there though putting it has failed
            _empty(folder)
        raise
    return f"{base}/{name}"


def _format_of(loops: Collection[SavedLoop]) -> int:
    return FORMAT if loops else _WITHOUT_LOOPS


def _require_untouched(url: str, folder: Folder, written: set[str]) -> None:
    """Raise if somebody deletes what is being written to *folder*, as a part that was left behind."""
    there = persistently(lambda: {each.name for each in folder.files()}, AWAY_TIMEOUT_S)
    if REMOVED in there or not written <= there:
        raise DeletedSavepoint(f"{url} was deleted while the export was under way. Export it again.")


def _files_of(operators: Iterable[SavedOperator], loops: Iterable[SavedLoop]) -> list[SavedFile]:
    saved: tuple[SavedOperator | SavedLoop, ...] = (*operators, *loops)
    return [file for each in saved for file in each.files]


def _exported(savepoint: Savepoint, operator: SavedOperator, folder: Folder) -> SavedOperator:
    files: list[SavedFile] = []
    key_forms = 0
    for entries in portions(savepoint.entries(operator.operator), FILE_BYTES, FILE_RECORDS, by_version=True):
        version = entries[0].version
        metadata = {
            "exactlyonce.operator": operator.operator,
            "exactlyonce.state_version": str(version),
        }
        if version == operator.version:  # of an older one nothing is known any more
            metadata["exactlyonce.state_schema"] = msgspec.json.encode(operator.schema).decode()
        key_forms |= forms_of(each.key for each in entries)
        records = [{"key_group": each.group, "key": each.key, "state": each.state} for each in entries]
        files.append(_put(folder, f"{operator.operator}-{len(files)}.avro", _STATES, records, metadata, version))
    return msgspec.structs.replace(operator, files=tuple(files), key_forms=key_forms)


def _exported_loop(savepoint: Savepoint, loop: SavedLoop, folder: Folder) -> SavedLoop:
    files: list[SavedFile] = []
    left = savepoint.going_round(loop.loop)
    while records := [each._asdict() for each in islice(left, FILE_RECORDS)]:
        metadata = {"exactlyonce.loop": loop.loop}
        files.append(_put(folder, f"{loop.loop}-{len(files)}.avro", _GOING_ROUND, records, metadata, 1))
    return msgspec.structs.replace(loop, files=tuple(files))


def _put(
    folder: Folder, name: str, schema: Any, records: list[dict[str, Any]], metadata: dict[str, str], version: int
) -> SavedFile:
    stream = io.BytesIO()
    writer(stream, schema, records, codec="deflate", metadata=metadata)
    content = stream.getvalue()
    _put_persistently(folder, name, content)
    return SavedFile(name, len(content), hashlib.sha256(content).hexdigest(), len(records), version)


def _put_persistently(folder: Folder, name: str, content: bytes) -> None:
    persistently(lambda: folder.put(name, content, _aside()), AWAY_TIMEOUT_S)


def _aside() -> str:
    return f"aside-{secrets.token_hex(8)}"


class ExportedSavepoint:
    """A `Savepoint` in a folder."""

    def __init__(self, url: str, folder: Folder, saved: Saved, sha256: str) -> None:
        self._url, self._folder = url, folder
        self.saved, self._sha256 = saved, sha256

    @staticmethod
    def at(url: str) -> ExportedSavepoint:
        """The one that `export` has written to *url*. ConfigError where there is none, `DamagedSavepoint`."""
        url, folder = _place(url)
        content = folder.get(METADATA)
        if content is None and (begun := _removal(folder)) is not None:
            raise ConfigError(
                f"The savepoint at {url} was deleted, and that was broken off. `exactlyonce savepoints delete "
                f"{begun.pipeline} {url}` removes what is left."
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
        some = [chain.from_iterable(map(self.read, [*same])) for _, same in files]
        return merge(*some, key=attrgetter("group"))

    def going_round(self, loop: str) -> Iterator[LoopEntry]:
        for saved in self.saved.loops:
            for each in saved.files if saved.loop == loop else ():
                yield from (LoopEntry(**fields) for fields in self._records(each))

    def operator(self, operator: str) -> SavedOperator:
        """What it has of *operator*; ConfigError, with those that there are, if it has nothing of it."""
        for each in self.saved.operators:
            if each.operator == operator:
                return each
        known = ", ".join(each.operator for each in self.saved.operators) or "none: the pipeline keeps no state"
        raise ConfigError(f"The {self.name} has no state of an operator {operator!r}. Its operators are: {known}.")

    def damage(self) -> list[str]:
        """What is wrong with its files, all of them; nothing: every byte is as it was written."""
        found = []
        for each in _files_of(self.saved.operators, self.saved.loops):
            try:
                for _ in self._records(each):
                    pass
            except DeletedSavepoint:
                raise
            except (DamagedSavepoint, ConfigError) as error:  # the latter for want of a right, say
                found.append(str(error))
        return found

    @property
    def files(self) -> int:
        """How many there are, without `_metadata.json`."""
        return len(_files_of(self.saved.operators, self.saved.loops))

    def read(self, file: SavedFile) -> Iterator[KeptEntry]:
        """The states in one of its files. Raises `DamagedSavepoint`."""
        for fields in self._records(file):
            yield KeptEntry(fields["key_group"], fields["key"], fields["state"], file.version)

    def _records(self, file: SavedFile) -> Iterator[Any]:
        content = persistently(lambda: self._folder.get(file.name), AWAY_TIMEOUT_S)
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
    """Remove the savepoint of *pipeline* at *url*, or what an export or a removal that was broken off has left; its
    checkpoint. ConfigError where there is none, or one of another pipeline; `DamagedSavepoint`."""
    url, folder = _place(url)
    begun = _removal(folder)
    if begun is None and (checkpoint := _empty_folder_removed(url, pipeline, folder)) is not None:
        return checkpoint
    if begun is None:
        begun = _left_by_export(url, pipeline, folder)
    if begun is None:
        saved = ExportedSavepoint.at(url).saved
        begun = _Removed(saved.pipeline, saved.checkpoint)
    if begun.pipeline != pipeline:
        raise ConfigError(f"{url} is a savepoint of {begun.pipeline}, not of {pipeline}. Nothing was deleted.")
    try:
        folder.put(REMOVED, msgspec.json.encode(begun), _aside())
    except StorageUnavailable:  # a disk that is full, say: this is how to make room
        _remove_all_but(folder, METADATA, REMOVED)
    folder.remove([METADATA])
    hit("savepoint-removing")
    _empty(folder)
    return begun.checkpoint


def _place(url: str) -> tuple[str, Folder]:
    """*url* in its one spelling, and the folder there."""
    url = storage_url(url)
    base, _, name = url.rpartition("/")
    scheme, host, path = parts_of(url)
    if not path or not (host or scheme == "file"):
        raise ConfigError(f"{url} is no savepoint: give the URL that `exactlyonce savepoint --to` has printed.")
    return url, folder_of(base, name)


def _removal(folder: Folder) -> _Removed | None:
    """What is being removed from *folder*, if it is."""
    content = folder.get(REMOVED)
    with suppress(msgspec.DecodeError, UnicodeDecodeError):  # then it is nothing of ours
        return msgspec.json.decode(content or b"", type=_Removed)
    return None


def _empty_folder_removed(url: str, pipeline: str, folder: Folder) -> int | None:
    """Remove an empty folder that is named as a savepoint of *pipeline*: what a removal has left that was broken off at
    its end. Its checkpoint; None: there is none."""
    checkpoint = _checkpoint_named(url, pipeline)
    if checkpoint is None or next(iter(folder.files()), None) is not None or not folder.remove_folder():
        return None
    return checkpoint


def _left_by_export(url: str, pipeline: str, folder: Folder) -> _Removed | None:
    """What an export of *pipeline* has left that was killed: a folder of its name, and in it only what it writes before
    it is a savepoint."""
    checkpoint, names = _checkpoint_named(url, pipeline), [each.name for each in folder.files()]
    if checkpoint is None or not names or not all(_PART.fullmatch(each) for each in names):
        return None
    return _Removed(pipeline, checkpoint)


def _checkpoint_named(url: str, pipeline: str) -> int | None:
    """The checkpoint of *pipeline* that *url* was exported from, by its name; None: it is not named as one."""
    named = re.fullmatch(rf"{re.escape(pipeline)}-(\d+)-[0-9a-f]{{8}}", url.rpartition("/")[2], re.ASCII)
    return int(named[1]) if named is not None else None


def _empty(folder: Folder) -> None:
    _remove_all_but(folder, REMOVED)
    folder.remove([REMOVED])
    folder.remove_folder()


def _remove_all_but(folder: Folder, *kept: str) -> None:
    folder.remove([each.name for each in folder.files() if each.name not in kept])


def _decoded(url: str, content: bytes) -> tuple[Saved, str]:
    with suppress(msgspec.DecodeError, UnicodeDecodeError):
        document = msgspec.json.decode(content, type=_Metadata)
        digest = hashlib.sha256(bytes(document.saved)).hexdigest()
        if document.format > FORMAT:
            raise ConfigError(f"The savepoint at {url} was written by a newer exactlyonce. Restore it with that.")
        saved = msgspec.json.decode(document.saved, type=Saved)
        if content == msgspec.json.encode(_Metadata(_format_of(saved.loops), document.saved, digest)):
            return saved, digest
    raise DamagedSavepoint(
        f"{url}/{METADATA} is damaged: its bytes are not those that were written. Nothing can be restored from this "
        f"savepoint unless the file is put back as it was: use a copy of it, or another savepoint."
    )
