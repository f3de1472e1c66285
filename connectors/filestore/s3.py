"""Files in a bucket of S3, or of a store with its protocol, by s3fs.

Keys, tokens, region and endpoint have the sources of every AWS client: the environment (`AWS_ACCESS_KEY_ID`,
`AWS_ENDPOINT_URL` ...), its configuration files, the role of the machine. Invariants: one request puts a file, whole or
not at all; it replaces nothing; the library repeats no request.

A waiting file is a multipart upload under its last name, which readers do not see. Its parts are durable at `sync`; the
request that completes it publishes it, from any process, and replaces nothing. Invariant: before the first upload in a
staged folder that folder has a file, so that an upload without one has no owner.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from functools import partial
from itertools import islice
from threading import BoundedSemaphore
from typing import Any, BinaryIO

import msgspec

from exactlyonce.connectors.filestore.store import (
    STORAGE,
    FileStore,
    NewFile,
    Retries,
    StoredFile,
    Upload,
    WaitingFile,
)
from exactlyonce.pipeline.errors import ConfigError, ExactlyOnceError, StorageUnavailable
from exactlyonce.pipeline.extras import needing

CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 5, 20
CONNECTIONS_MAX = 32
REMOVED_AT_ONCE = 1_000
"""The protocol's limit."""
PART_BYTES = 8 << 20
"""Of an upload; S3 wants 5 MiB at least."""
PARTS_AT_ONCE = 4
"""The parts of uploads that are on their way, and in memory."""
TOKEN = "exactlyonce"
"""The metadata that proves whose upload a file was."""
_NO_BUCKET = ("NoSuchBucket",)
_NO_FILE = ("NoSuchKey", "404")
_BEHIND_END = ("InvalidRange", "416")
_THERE = ("PreconditionFailed", "412")
_NO_UPLOAD = ("NoSuchUpload",)
_NO_RULES = ("NoSuchLifecycleConfiguration", "NotImplemented", "501")
_NO_CONDITION = ("NotImplemented", "501")
_NO_RIGHT = ("AccessDenied", "AllAccessDisabled", "Forbidden", "403")
_RIGHTS = {
    "put_object": "s3:PutObject",
    "create_multipart_upload": "s3:PutObject",
    "upload_part": "s3:PutObject",
    "complete_multipart_upload": "s3:PutObject",
    "get_object": "s3:GetObject",
    "head_object": "s3:GetObject",
    "delete_object": "s3:DeleteObject",
    "delete_objects": "s3:DeleteObject",
    "list_objects_v2": "s3:ListBucket",
    "list_parts": "s3:ListMultipartUploadParts",
    "abort_multipart_upload": "s3:AbortMultipartUpload",
    "list_multipart_uploads": "s3:ListBucketMultipartUploads",
    "get_bucket_lifecycle_configuration": "s3:GetLifecycleConfiguration",
}
"""The right that each request needs."""
_NOT_KNOWN = (
    *("InvalidAccessKeyId", "InvalidClientTokenId", "InvalidToken", "ExpiredToken"),
    *("SignatureDoesNotMatch", "AuthorizationHeaderMalformed"),
)
_WRONG = (
    *("InvalidPart", "InvalidPartOrder", "EntityTooSmall", "EntityTooLarge", "InvalidBucketName", "KeyTooLongError"),
    *("PermanentRedirect", "301", "IllegalLocationConstraintException"),
)
"""The codes of permanent errors."""


_lock = threading.Lock()
_made: dict[tuple[object, ...], Any] = {}


def _file_system(named: str) -> Any:
    """The file system of s3fs for the present settings, which all folders of this process share: it takes a second.

    It is created with the first request: not every process of a pipeline makes one.
    """
    settings = sorted((name, value) for name, value in os.environ.items() if name.startswith("AWS_"))
    with _lock:
        made = _made.get(key := (os.getpid(), *settings))
        if made is None:
            with needing("s3", "s3fs", named):
                import s3fs

            config = {
                "connect_timeout": CONNECT_TIMEOUT_S, "read_timeout": READ_TIMEOUT_S,
                "retries": {"total_max_attempts": 1}, "max_pool_connections": CONNECTIONS_MAX,
            }  # fmt: skip
            made = s3fs.S3FileSystem(config_kwargs=config, use_listings_cache=False, skip_instance_cache=True)
            made.retries = 1
            _made.clear()
            _made[key] = made
        return made


class S3Store(FileStore):
    """The keys that begin with *prefix* and a slash, in *bucket*. Errors begin with *what*."""

    removers = (
        "another program or a lifecycle rule of the bucket has removed or aborted it; `exactlyonce doctor` tells of "
        "such a rule. Keep these out of"
    )

    def __init__(self, bucket: str, prefix: str, what: str = STORAGE) -> None:
        self._bucket, self._prefix = bucket, f"{prefix}/" if prefix else ""
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self._named = f"{what} {self.url}"
        self._owners = set[str]()
        """Staged folders that have a file."""
        self.parts = ThreadPoolExecutor(PARTS_AT_ONCE, "parts")
        self.room = BoundedSemaphore(PARTS_AT_ONCE)

    def check(self, folder: str = "") -> None:
        probe = f"{folder}/probe".lstrip("/")
        self.put(probe, b"probe", "")
        self.get(probe)
        self._asked("delete_object", Key=self._prefix + probe)
        self._asked("list_objects_v2", Prefix=self._prefix, MaxKeys=1)

    def put(self, name: str, content: bytes | BinaryIO, aside: str) -> bool:
        if not isinstance(content, bytes):
            content.seek(0)
        answer = self._asked("put_object", _THERE, Key=self._prefix + name, Body=content, IfNoneMatch="*")
        return answer is not None  # else an earlier attempt may have put it, and lost its answer

    def get(self, name: str) -> bytes | None:
        return self._content(name)

    def get_range(self, name: str, offset: int, length: int) -> bytes | None:
        return self._content(name, Range=f"bytes={offset}-{offset + length - 1}")

    def _content(self, name: str, **part: str) -> bytes | None:
        file_system = _file_system(self._named)
        from fsspec.asyn import sync

        async def read() -> bytes:
            answer = await file_system._call_s3("get_object", Bucket=self._bucket, Key=self._prefix + name, **part)
            async with answer["Body"] as body:
                content: bytes = await body.read()
            return content

        try:
            with self._explained("get_object"):
                content: bytes = sync(file_system.loop, read)
                return content
        except _Answered as answer:
            if answer.code in _NO_FILE:
                return None
            if answer.code in _BEHIND_END:
                return b""
            raise answer.error from answer

    def files(self) -> Iterator[StoredFile]:
        for listing in self._listings("list_objects_v2", Prefix=self._prefix):
            yield from self._stored(listing)

    def _stored(self, listing: Any) -> Iterator[StoredFile]:
        for entry in listing.get("Contents", ()):
            written_at_ms = int(entry["LastModified"].timestamp() * 1000)
            yield StoredFile(entry["Key"][len(self._prefix) :], entry["Size"], written_at_ms, _tag(entry))

    def names_in(self, folder: str) -> list[str]:
        start = f"{self._prefix}{folder}/" if folder else self._prefix
        names: list[str] = []
        for listing in self._listings("list_objects_v2", Prefix=start, Delimiter="/"):
            names += (entry["Key"][len(start) :] for entry in listing.get("Contents", ()))
            names += (inner["Prefix"][len(start) : -1] for inner in listing.get("CommonPrefixes", ()))
        return names

    def visible(self) -> Iterator[StoredFile]:
        return (file for file in super().visible() if not file.name.endswith("/"))

    def _listings(self, method: str, **arguments: str) -> Iterator[Any]:
        more: dict[str, str] = {}
        while True:
            listing = self._asked(method, **arguments, **more)
            yield listing
            if not listing.get("IsTruncated"):
                return
            if method == "list_multipart_uploads":
                more = {"KeyMarker": listing["NextKeyMarker"], "UploadIdMarker": listing["NextUploadIdMarker"]}
            else:
                more = {"ContinuationToken": listing["NextContinuationToken"]}

    def look(self, name: str) -> StoredFile | None:
        head = self._head(name)
        if head is None:
            return None
        return StoredFile(name, head["ContentLength"], int(head["LastModified"].timestamp() * 1000), _tag(head))

    def _head(self, name: str) -> Any:
        return self._asked("head_object", _NO_FILE, Key=self._prefix + name)

    def remove(self, names: Iterable[str]) -> None:
        left = iter(names)
        while batch := list(islice(left, REMOVED_AT_ONCE)):
            keys = [{"Key": self._prefix + name} for name in batch]
            answer = self._asked("delete_objects", Delete={"Objects": keys, "Quiet": True})
            for error in answer.get("Errors", ()):
                raise self._error("delete_objects", str(error.get("Code")), str(error.get("Message")))

    def remove_all(self, folder: str) -> None:
        for listing in self._listings("list_objects_v2", Prefix=f"{self._prefix}{folder}/"):
            self.remove([file.name for file in self._stored(listing)])

    def remove_folder(self) -> bool:
        """There are only keys, and no folders."""
        return False

    def doubts(self) -> tuple[str, str]:
        try:
            days = self._uploads_last_days()
        except ConfigError as error:  # the right to see the rules is one of its own
            return "", f"whether a lifecycle rule of the bucket aborts uploads cannot be seen: {str(error).rstrip('.')}"
        if days is None:
            return "", ""
        return "", (
            f"a lifecycle rule of the bucket aborts uploads in {self.url} after {days} days, and output that was "
            f"decided waits as uploads until it is committed"
        )

    # --- files that wait to be published

    def check_publishing(self, at: str, staged: str, path: str) -> None:
        upload = self.begin_upload(path, {})
        self.has_upload(path, upload)
        self.abort_upload(path, upload)
        next(self.uploads(), None)

    def create(self, at: str, staged: str, path: str, retries: Retries) -> NewFile:
        if (owner := f"{at}/{staged.rpartition('/')[0]}") not in self._owners:
            retries(lambda: self.put(f"{owner}/writer", b"", ""))
            self._owners.add(owner)
        return _S3NewFile(self, staged, path, retries)

    def publish(self, at: str, files: Sequence[WaitingFile], waiting: Iterable[WaitingFile]) -> None:
        self._each(partial(self._complete, at), list(waiting))

    def _complete(self, at: str, file: WaitingFile) -> None:
        if not self.complete_upload(file.path, file.upload, file.parts):
            self._require_published(at, file)

    def _waits(self, at: str, file: WaitingFile) -> bool:
        if self.has_upload(file.path, file.upload):
            return True
        self._require_published(at, file)
        return False

    def _is_published(self, file: WaitingFile) -> bool | None:
        head = self._head(file.path)
        if head is None:
            return None
        return bool((head["ContentLength"], head["Metadata"].get(TOKEN)) == (file.size, file.staged))

    def _waiting_name(self, at: str, file: WaitingFile) -> str:
        return f"The upload of {self.url}/{file.path}"

    def drop_uploads(self, is_left: Callable[[Upload], bool]) -> None:
        for upload in list(self.uploads()):
            if is_left(upload):
                self.abort_upload(upload.name, upload.id)

    def end(self) -> None:
        self.parts.shutdown(wait=False)

    def begin_upload(self, name: str, metadata: Mapping[str, str]) -> str:
        """The id of a new upload."""
        answer = self._asked("create_multipart_upload", Key=self._prefix + name, Metadata=dict(metadata))
        return str(answer["UploadId"])

    def upload_part(self, name: str, upload: str, number: int, content: bytes) -> str:
        """Put a part, of 5 MiB at least unless it is the last; -> its ETag. Numbers begin with 1."""
        answer = self._asked("upload_part", Key=self._prefix + name, UploadId=upload, PartNumber=number, Body=content)
        return str(answer["ETag"])

    def has_upload(self, name: str, upload: str) -> bool:
        """Whether it is neither completed nor aborted."""
        answer = self._asked("list_parts", _NO_UPLOAD, Key=self._prefix + name, UploadId=upload, MaxParts=1)
        return answer is not None

    def complete_upload(self, name: str, upload: str, etags: Sequence[str]) -> bool:
        """The file appears; False: there is no such upload (any more), or a file of that name."""
        parts = [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(etags, 1)]
        answer = self._asked(
            "complete_multipart_upload", (*_NO_UPLOAD, *_THERE), Key=self._prefix + name, UploadId=upload,
            MultipartUpload={"Parts": parts}, IfNoneMatch="*",
        )  # fmt: skip
        return answer is not None

    def abort_upload(self, name: str, upload: str) -> None:
        """Drop an upload; one that is completed or aborted is no error."""
        self._asked("abort_multipart_upload", _NO_UPLOAD, Key=self._prefix + name, UploadId=upload)

    def uploads(self) -> Iterator[Upload]:
        """Those under way of all files in the folder, and in the folders in it."""
        for listing in self._listings("list_multipart_uploads", Prefix=self._prefix):
            now = parsedate_to_datetime(listing["ResponseMetadata"]["HTTPHeaders"]["date"])
            for entry in listing.get("Uploads", ()):
                age_ms = int((now - entry["Initiated"]).total_seconds() * 1000)
                yield Upload(entry["Key"][len(self._prefix) :], entry["UploadId"], age_ms)

    def _uploads_last_days(self) -> int | None:
        """The days after which a lifecycle rule of the bucket aborts uploads of the folder; None: no rule does."""
        answer = self._asked("get_bucket_lifecycle_configuration", _NO_RULES)
        days = []
        for rule in answer["Rules"] if answer is not None else ():
            aborts, filtered = rule.get("AbortIncompleteMultipartUpload"), rule.get("Filter", {})
            prefix = rule.get("Prefix") or filtered.get("Prefix") or filtered.get("And", {}).get("Prefix") or ""
            concerns = self._prefix.startswith(prefix) or prefix.startswith(self._prefix)
            if aborts and rule["Status"] == "Enabled" and concerns:
                days.append(int(aborts["DaysAfterInitiation"]))
        return min(days, default=None)

    # --- requests

    def _asked(self, method: str, unless: Sequence[str] = (), **arguments: Any) -> Any:
        """The answer to a request; None for an error of the store with one of the codes *unless*, else ours."""
        call: Callable[..., Any] = _file_system(self._named).call_s3
        try:
            with self._explained(method):
                return call(method, Bucket=self._bucket, **arguments)
        except _Answered as answer:
            if answer.code in unless:
                return None
            raise answer.error from answer

    @contextmanager
    def _explained(self, method: str) -> Iterator[None]:
        """Raise `_Answered` for an error of the store, `StorageUnavailable` without an answer."""
        from botocore.exceptions import ClientError, NoCredentialsError, PartialCredentialsError

        try:
            yield
        except ExactlyOnceError:
            raise
        except (NoCredentialsError, PartialCredentialsError) as error:
            raise ConfigError(
                f"{self._named} needs credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or "
                f"give the machine a role."
            ) from error
        except Exception as error:  # from botocore, aiohttp, ssl or asyncio, or an OSError of s3fs
            cause = error if isinstance(error, ClientError) else error.__cause__
            if isinstance(cause, ClientError):
                code, text = cause.response["Error"].get("Code", ""), cause.response["Error"].get("Message", "")
                raise _Answered(str(code), self._error(method, str(code), str(text))) from error
            if wrong := _wrong_setting(cause or error, self._bucket):
                raise ConfigError(f"{self._named} cannot be used: {wrong}.") from error
            raise StorageUnavailable(f"{self._named} does not answer: {type(cause or error).__name__}.") from error

    def _error(self, method: str, code: str, text: str) -> ExactlyOnceError:
        """Our error for an answer to *method*; its text is left out where it may repeat a key or a signature."""
        if code in _NO_BUCKET:
            return ConfigError(f"There is no bucket {self._bucket}: create it, or correct {self.url}.")
        if code in _NO_RIGHT:
            return ConfigError(f"{self._named} refuses ({code}): give the user the right {_RIGHTS[method]} there.")
        if code in _NOT_KNOWN:
            return ConfigError(
                f"{self._named} refuses the credentials ({code}): correct AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
                f"or the profile or role that they come from."
            )
        if code in _WRONG:
            return ConfigError(f"{self._named} refuses ({code}): {text}")
        if code in _NO_CONDITION:
            return ConfigError(
                f"{self._named} does not know If-None-Match ({code}), without which a file could replace another: use "
                f"a store that does, such as S3 itself, MinIO, Ceph or R2."
            )
        return StorageUnavailable(f"{self._named} answers with an error ({code}): {text}")


class _S3NewFile(NewFile):
    """A file that is uploaded while it is written."""

    def __init__(self, store: S3Store, staged: str, path: str, retries: Retries) -> None:
        super().__init__(staged, PART_BYTES)
        self._store, self._path, self._retries = store, path, retries
        self._id = ""
        self._etags: list[Future[str]] = []

    def _put(self, part: bytes | memoryview) -> None:
        """Waits while too many parts are on their way."""
        if not self._id:
            self._id = self._retries(lambda: self._store.begin_upload(self._path, {TOKEN: self._staged}))
        for etag in self._etags:
            if etag.done():
                etag.result()  # raises what has failed
        self._store.room.acquire()
        self._etags.append(self._store.parts.submit(self._upload, len(self._etags) + 1, bytes(part)))

    def _upload(self, number: int, part: bytes) -> str:
        try:
            return self._retries(lambda: self._store.upload_part(self._path, self._id, number, part))
        finally:
            self._store.room.release()

    def sync(self) -> None:
        if (rest := self._last()) or not self._etags:
            self._put(rest)
        for etag in self._etags:
            etag.result()

    def waiting(self, rows: int) -> WaitingFile:
        parts = tuple(etag.result() for etag in self._etags)
        return msgspec.structs.replace(super().waiting(rows), path=self._path, upload=self._id, parts=parts)


def _tag(answer: Mapping[str, Any]) -> str:
    return str(answer.get("ETag", "")).strip('"')


def _wrong_setting(error: BaseException, bucket: str) -> str:
    """The mistake in the settings that prevented a request, and its remedy; empty: another error."""
    from botocore import exceptions as of_aws

    text = str(error)
    if isinstance(error, of_aws.ParamValidationError) and "bucket name" in text:
        return f"{bucket} cannot be the name of a bucket; correct the URL"
    if isinstance(error, of_aws.ProfileNotFound):
        return f"{text}; correct AWS_PROFILE, or add the profile to the configuration of AWS"
    if isinstance(error, (of_aws.ConfigParseError, of_aws.ConfigNotFound)):
        return f"{text}; correct that file, or AWS_CONFIG_FILE"
    if isinstance(error, (of_aws.EndpointResolutionError, ValueError)) and "endpoint" in text.lower():
        shown = "" if "@" in text else f" ({text})"  # a password may stand before it
        return f"its endpoint is not a URL{shown}; write AWS_ENDPOINT_URL, or the profile's endpoint_url, as http://host:port"
    return ""


class _Answered(Exception):
    """The store has answered with an error."""

    def __init__(self, code: str, error: ExactlyOnceError) -> None:
        super().__init__(code)
        self.code, self.error = code, error
