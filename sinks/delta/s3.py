"""The folder of a table in S3, as a file system of pyarrow's, by the storage options of delta-rs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import pyarrow.fs as pa_fs

LIMITS = {"timeout": "30s", "retry_timeout": "60s", "max_retries": "3"}
"""How long delta-rs waits for a store that does not answer, unless an option says otherwise. A repeated commit is
refused: it puts a file that must not exist."""
_CONNECT_TIMEOUT_S, _REQUEST_TIMEOUT_S, _ATTEMPTS_MAX = 5, 20, 3
_ENDPOINTS = ("endpoint", "endpoint_url", "endpoint_url_s3")


def is_s3(address: str) -> bool:
    """Whether *address* names a bucket of S3.

    >>> is_s3("s3://lake/totals"), is_s3("/s3/totals")
    (True, False)
    """
    return urlsplit(address).scheme in ("s3", "s3a")


def file_system(address: str, options: Mapping[str, str]) -> Any:
    """The file system below *address*. An option that is not given has the source of every AWS client."""
    settings = {**_settings(os.environ), **_settings(options)}
    endpoint = urlsplit(next((settings[name] for name in _ENDPOINTS if name in settings), ""))
    store = pa_fs.S3FileSystem(
        access_key=settings.get("access_key_id"), secret_key=settings.get("secret_access_key"),
        session_token=settings.get("session_token", settings.get("token")),
        region=settings.get("region", settings.get("default_region")),
        endpoint_override=endpoint.netloc or None, scheme=endpoint.scheme or "https",
        force_virtual_addressing=settings.get("virtual_hosted_style_request", "").lower() == "true",
        connect_timeout=_CONNECT_TIMEOUT_S, request_timeout=_REQUEST_TIMEOUT_S,
        retry_strategy=pa_fs.AwsStandardS3RetryStrategy(max_attempts=_ATTEMPTS_MAX),
    )  # fmt: skip
    parts = urlsplit(address)
    return pa_fs.SubTreeFileSystem(f"{parts.netloc}{parts.path}".rstrip("/"), store)


def _settings(options: Mapping[str, str]) -> dict[str, str]:
    """Those of AWS, by their names without its prefix.

    >>> _settings({"AWS_REGION": "eu-west-1", "aws_endpoint_url": "http://127.0.0.1:9000", "HOME": "/"})
    {'region': 'eu-west-1', 'endpoint_url': 'http://127.0.0.1:9000'}
    """
    lower = {name.lower(): value for name, value in options.items()}
    return {name.removeprefix("aws_"): value for name, value in lower.items() if name.startswith("aws_")}
