"""The URLs of storages: one spelling each, and never a secret."""

from __future__ import annotations

import pytest

from exactlyonce.checkpoint.records.storage_url import TOPIC, parts_of, storage_setting, storage_url
from exactlyonce.pipeline.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "url", "parts"),
    [
        ("file:///mnt//checkpoints/", "file:///mnt/checkpoints", ("file", "", "mnt/checkpoints")),
        ("/mnt//checkpoints/", "file:///mnt/checkpoints", ("file", "", "mnt/checkpoints")),
        ("FILE:///a", "file:///a", ("file", "", "a")),
        ("s3://bucket", "s3://bucket", ("s3", "bucket", "")),
        ("s3://bucket/a/b/", "s3://bucket/a/b", ("s3", "bucket", "a/b")),
        ("hdfs://node:8020/checkpoints", "hdfs://node:8020/checkpoints", ("hdfs", "node:8020", "checkpoints")),
        ("hdfs://[::1]:8020/a", "hdfs://[::1]:8020/a", ("hdfs", "[::1]:8020", "a")),
        ("hdfs://nameservice", "hdfs://nameservice", ("hdfs", "nameservice", "")),
    ],
)
def test_one_spelling(text: str, url: str, parts: tuple[str, str, str]) -> None:
    assert storage_url(text) == url
    assert storage_url(url) == url
    assert parts_of(url) == parts


@pytest.mark.parametrize(
    "text",
    [
        "checkpoints", "./checkpoints", "/", "/a/../b", "file://host/a", "file:///", "s3:///a", "hdfs:///a", "gs://bucket/a",
        "s3://bucket/../a", "file:///a/./b", "s3://user:canary@bucket/a", "s3://bucket/a?key=canary",
        "s3://bucket/a#canary", "file:///a\nb", "s3a://bucket/x", "s3://user:canary/rest@bucket/a",
        "hdfs://user:canary/rest@node:8020/a", "hdfs://node:port/a",
    ],
)  # fmt: skip
def test_what_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match=r"Write /folder, hdfs://\S+ or s3://bucket/prefix") as error:
        storage_url(text)
    assert "canary" not in str(error.value)
    assert str(error.value).startswith("The URL of a storage: ")


def test_whose_it_is() -> None:
    with pytest.raises(ConfigError, match=r"^checkpoint_storage \(.*\): it is .*; or topic, the default\.$"):
        storage_setting("checkpoints")
    assert storage_setting("topic") == storage_setting("") == TOPIC
    with pytest.raises(ConfigError, match=r"^--to: there is no storage gs://\. Write [^;]*s3://bucket/prefix\.$"):
        storage_url("gs://bucket/a", "--to")
    with pytest.raises(ConfigError, match=r"^--to: it is neither"):
        storage_url("topic", "--to")
