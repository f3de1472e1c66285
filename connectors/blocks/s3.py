"""Files in a bucket of S3, or of a store with its protocol, by s3fs.

Keys, tokens, region and endpoint have the sources of every AWS client: the environment (`AWS_ACCESS_KEY_ID`,
`AWS_ENDPOINT_URL` ...), its configuration files, the role of the machine. Invariants: one request puts a file, whole or
not at all; it replaces nothing; the library repeats no request.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from itertools import islice
from typing import Any, BinaryIO, NamedTuple

from exactlyonce.connectors.blocks.folder import STORAGE, StoredFile
from exactlyonce.pipeline.errors import ConfigError, ExactlyOnceError, StorageUnavailable
from exactlyonce.pipeline.extras import needing

CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 5, 20
CONNECTIONS_MAX = 32
REMOVED_AT_ONCE = 1_000
"""The protocol's limit."""
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
    *(
        "InvalidPart",
        "InvalidPartOrder",
        "EntityTooSmall",
        "EntityTooLarge",
        "InvalidBucketName",
        "KeyTooLongError",
        "PermanentRedirect",
        "301",
    ),
    "IllegalLocationConstraintException",
)
"""The codes of permanent errors."""


class Upload(NamedTuple):
    """A multipart upload that is under way."""

    name: str
    """That of its file."""
    id: str
    age_ms: int
    """By the store's clock."""


class StoredObject(NamedTuple):
    size: int
    metadata: Mapping[str, str]


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


class S3Folder:
    """The keys that begin with *prefix* and a slash, in *bucket*: a `Folder`, a `Tree`, and multipart uploads.

    Errors begin with *what*.
    """

    def __init__(self, bucket: str, prefix: str, what: str = STORAGE) -> None:
        self._bucket, self._prefix = bucket, f"{prefix}/" if prefix else ""
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self._named = f"{what} {self.url}"

    def check(self) -> None:
        self.put("probe", b"probe", "")
        self.get("probe")
        self._asked("delete_object", Key=f"{self._prefix}probe")
        self._asked("list_objects_v2", Prefix=self._prefix, MaxKeys=1)

    def put(self, name: str, content: bytes, aside: str) -> None:
        self._put(name, content)

    def put_file(self, name: str, file: BinaryIO, aside: str) -> None:
        file.seek(0)
        self._put(name, file)

    def put_new(self, name: str, content: bytes, aside: str) -> bool:
        return self._put(name, content)

    def _put(self, name: str, content: bytes | BinaryIO) -> bool:
        """False: the file exists."""
        try:
            self._call("put_object", Key=self._prefix + name, Body=content, IfNoneMatch="*")
        except _Answered as answer:
            if answer.code not in _THERE:  # else an earlier attempt may have put it, and lost its answer
                raise answer.error from answer
            return False
        return True

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

    def children(self, inner: str) -> dict[str, int]:
        start = f"{inner}/" if inner else ""
        found: dict[str, int] = {}
        for listing in self._listings("list_objects_v2", Prefix=self._prefix + start, Delimiter="/"):
            found |= {file.name[len(start) :]: file.written_at_ms for file in self._stored(listing)}
            folders = (folder["Prefix"][len(self._prefix + start) : -1] for folder in listing.get("CommonPrefixes", ()))
            found |= dict.fromkeys(folders, 0)
        return found

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
        """One file; None: it is not there."""
        head = self._head(name)
        if head is None:
            return None
        return StoredFile(name, head["ContentLength"], int(head["LastModified"].timestamp() * 1000), _tag(head))

    def _head(self, name: str) -> Any:
        try:
            return self._call("head_object", Key=self._prefix + name)
        except _Answered as answer:
            if answer.code in _NO_FILE:
                return None
            raise answer.error from answer

    def remove(self, names: Iterable[str]) -> None:
        left = iter(names)
        while batch := list(islice(left, REMOVED_AT_ONCE)):
            keys = [{"Key": self._prefix + name} for name in batch]
            answer = self._asked("delete_objects", Delete={"Objects": keys, "Quiet": True})
            for error in answer.get("Errors", ()):
                raise self._error("delete_objects", str(error.get("Code")), str(error.get("Message")))

    def remove_tree(self, inner: str) -> None:
        for listing in self._listings("list_objects_v2", Prefix=f"{self._prefix}{inner}/"):
            self.remove([file.name for file in self._stored(listing)])

    def remove_folder(self) -> bool:
        """There are only keys, and no folders."""
        return False

    # --- multipart uploads: a file appears when its upload is completed, by any process

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
        try:
            self._call("list_parts", Key=self._prefix + name, UploadId=upload, MaxParts=1)
        except _Answered as answer:
            if answer.code in _NO_UPLOAD:
                return False
            raise answer.error from answer
        return True

    def complete_upload(self, name: str, upload: str, etags: Sequence[str]) -> bool:
        """The file appears; False: there is no such upload (any more), or a file of that name."""
        parts = [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(etags, 1)]
        try:
            self._call(
                "complete_multipart_upload", Key=self._prefix + name, UploadId=upload, MultipartUpload={"Parts": parts},
                IfNoneMatch="*",
            )  # fmt: skip
        except _Answered as answer:
            if answer.code in (*_NO_UPLOAD, *_THERE):
                return False
            raise answer.error from answer
        return True

    def abort_upload(self, name: str, upload: str) -> None:
        """Drop an upload; one that is completed or aborted is no error."""
        try:
            self._call("abort_multipart_upload", Key=self._prefix + name, UploadId=upload)
        except _Answered as answer:
            if answer.code not in _NO_UPLOAD:
                raise answer.error from answer

    def uploads(self) -> Iterator[Upload]:
        """Those under way of all files in the folder, and in the folders in it."""
        for listing in self._listings("list_multipart_uploads", Prefix=self._prefix):
            now = parsedate_to_datetime(listing["ResponseMetadata"]["HTTPHeaders"]["date"])
            for entry in listing.get("Uploads", ()):
                age_ms = int((now - entry["Initiated"]).total_seconds() * 1000)
                yield Upload(entry["Key"][len(self._prefix) :], entry["UploadId"], age_ms)

    def stored(self, name: str) -> StoredObject | None:
        """The size and metadata of a file; None without one."""
        head = self._head(name)
        return None if head is None else StoredObject(head["ContentLength"], head["Metadata"])

    def uploads_last_days(self) -> int | None:
        """The days after which a lifecycle rule of the bucket aborts uploads of the folder; None: no rule does."""
        try:
            rules = self._call("get_bucket_lifecycle_configuration")["Rules"]
        except _Answered as answer:
            if answer.code in _NO_RULES:
                return None
            raise answer.error from answer
        days = []
        for rule in rules:
            aborts, filtered = rule.get("AbortIncompleteMultipartUpload"), rule.get("Filter", {})
            prefix = rule.get("Prefix") or filtered.get("Prefix") or filtered.get("And", {}).get("Prefix") or ""
            concerns = self._prefix.startswith(prefix) or prefix.startswith(self._prefix)
            if aborts and rule["Status"] == "Enabled" and concerns:
                days.append(int(aborts["DaysAfterInitiation"]))
        return min(days, default=None)

    # --- requests

    def _asked(self, method: str, **arguments: Any) -> Any:
        """The answer to a request; raises our error for an error of the store."""
        try:
            return self._call(method, **arguments)
        except _Answered as answer:
            raise answer.error from answer

    def _call(self, method: str, **arguments: Any) -> Any:
        call: Callable[..., Any] = _file_system(self._named).call_s3
        with self._explained(method):
            return call(method, Bucket=self._bucket, **arguments)

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
