"""Files in a bucket of S3, or of a store with its protocol, by s3fs.

Keys, tokens, region and endpoint have the sources of every AWS client: the environment (`AWS_ACCESS_KEY_ID`,
`AWS_ENDPOINT_URL` ...), its configuration files, the role of the machine. Invariants: one request puts a file, whole or
not at all; it replaces nothing; the library repeats no request.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, BinaryIO

from exactlyonce.connectors.blocks.folder import STORAGE, StoredFile
from exactlyonce.pipeline.errors import ConfigError, ExactlyOnceError, StorageUnavailable
from exactlyonce.pipeline.extras import needing

CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 5, 20
REMOVED_AT_ONCE = 1_000
"""The protocol's limit."""
_NO_BUCKET = ("NoSuchBucket",)
_NO_FILE = ("NoSuchKey", "404")
_BEHIND_END = ("InvalidRange", "416")
_THERE = ("PreconditionFailed", "412")
_NO_CONDITION = ("NotImplemented", "501")
_NO_RIGHT = (
    *("AccessDenied", "AllAccessDisabled", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "403"),
    *("InvalidClientTokenId", "AuthorizationHeaderMalformed", "InvalidToken", "Forbidden"),
)
_WRONG = (
    *("EntityTooLarge", "InvalidBucketName", "KeyTooLongError", "PermanentRedirect", "301"),
    "IllegalLocationConstraintException",
)
"""The codes of permanent errors."""


class S3Folder:
    """The `Folder` of the keys that begin with *prefix* and a slash, in *bucket*. Errors begin with *what*."""

    def __init__(self, bucket: str, prefix: str, what: str = STORAGE) -> None:
        self._bucket, self._prefix = bucket, f"{prefix}/"
        self.url = f"s3://{bucket}/{prefix}"
        self._named = f"{what} {self.url}"
        self._lock = threading.Lock()
        self._made: Any = None

    def check(self) -> None:
        self.put("probe", b"probe", "")
        self._asked("delete_object", Key=f"{self._prefix}probe")
        self._asked("list_objects_v2", Prefix=self._prefix, MaxKeys=1)

    def put(self, name: str, content: bytes, aside: str) -> None:
        self._put(name, content)

    def put_file(self, name: str, file: BinaryIO, aside: str) -> None:
        file.seek(0)
        self._put(name, file)

    def _put(self, name: str, content: bytes | BinaryIO) -> None:
        try:
            self._call("put_object", Key=self._prefix + name, Body=content, IfNoneMatch="*")
        except _Answered as answer:
            if answer.code not in _THERE:  # else an earlier attempt has put it, and lost its answer
                raise answer.error from answer

    def get(self, name: str) -> bytes | None:
        return self._content(name)

    def get_range(self, name: str, offset: int, length: int) -> bytes | None:
        return self._content(name, Range=f"bytes={offset}-{offset + length - 1}")

    def _content(self, name: str, **part: str) -> bytes | None:
        file_system = self._file_system()
        from fsspec.asyn import sync

        async def read() -> bytes:
            answer = await file_system._call_s3("get_object", Bucket=self._bucket, Key=self._prefix + name, **part)
            async with answer["Body"] as body:
                content: bytes = await body.read()
            return content

        try:
            with self._explained():
                content: bytes = sync(file_system.loop, read)
                return content
        except _Answered as answer:
            if answer.code in _NO_FILE:
                return None
            if answer.code in _BEHIND_END:
                return b""
            raise answer.error from answer

    def files(self) -> Iterator[StoredFile]:
        more: dict[str, str] = {}
        while True:
            listing = self._asked("list_objects_v2", Prefix=self._prefix, **more)
            for entry in listing.get("Contents", ()):
                written_at_ms = int(entry["LastModified"].timestamp() * 1000)
                yield StoredFile(entry["Key"][len(self._prefix) :], entry["Size"], written_at_ms)
            if not listing.get("IsTruncated"):
                return
            more = {"ContinuationToken": listing["NextContinuationToken"]}

    def remove(self, names: Iterable[str]) -> None:
        left = iter(names)
        while batch := list(islice(left, REMOVED_AT_ONCE)):
            keys = [{"Key": self._prefix + name} for name in batch]
            answer = self._asked("delete_objects", Delete={"Objects": keys, "Quiet": True})
            for error in answer.get("Errors", ()):
                raise self._error(str(error.get("Code")), str(error.get("Message")))

    def remove_folder(self) -> bool:
        """There are only keys, and no folders."""
        return False

    def _file_system(self) -> Any:
        """Created with the first request: not every process of a pipeline makes one."""
        with self._lock:
            if self._made is None:
                with needing("s3", "s3fs", self._named):
                    import s3fs

                config = {
                    "connect_timeout": CONNECT_TIMEOUT_S, "read_timeout": READ_TIMEOUT_S,
                    "retries": {"total_max_attempts": 1},
                }  # fmt: skip
                self._made = s3fs.S3FileSystem(config_kwargs=config, use_listings_cache=False, skip_instance_cache=True)
                self._made.retries = 1
            return self._made

    def _asked(self, method: str, **arguments: Any) -> Any:
        """The answer to a request; raises our error for an error of the store."""
        try:
            return self._call(method, **arguments)
        except _Answered as answer:
            raise answer.error from answer

    def _call(self, method: str, **arguments: Any) -> Any:
        call: Callable[..., Any] = self._file_system().call_s3
        with self._explained():
            return call(method, Bucket=self._bucket, **arguments)

    @contextmanager
    def _explained(self) -> Iterator[None]:
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
                raise _Answered(str(code), self._error(str(code), str(text))) from error
            if wrong := _wrong_setting(cause or error, self._bucket):
                raise ConfigError(f"{self._named} cannot be used: {wrong}.") from error
            raise StorageUnavailable(f"{self._named} does not answer: {type(cause or error).__name__}.") from error

    def _error(self, code: str, text: str) -> ExactlyOnceError:
        """Our error for an answer; its text is left out where it may repeat a key or a signature."""
        if code in _NO_BUCKET:
            return ConfigError(f"There is no bucket {self._bucket}: create it, or correct {self.url}.")
        if code in _NO_RIGHT:
            return ConfigError(
                f"{self._named} refuses the credentials ({code}): they need the rights to put, get, list and delete "
                f"objects there."
            )
        if code in _WRONG:
            return ConfigError(f"{self._named} refuses ({code}): {text}")
        if code in _NO_CONDITION:
            return ConfigError(
                f"{self._named} does not know If-None-Match ({code}), without which a file could replace another: use "
                f"a store that does, such as S3 itself, MinIO, Ceph or R2."
            )
        return StorageUnavailable(f"{self._named} answers with an error ({code}): {text}")


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
