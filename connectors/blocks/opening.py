"""The folder of one pipeline in a storage, by the storage's URL."""

from __future__ import annotations

from pathlib import Path

from exactlyonce.checkpoint.records.storage_url import parts_of
from exactlyonce.checkpoint.records.topic_info import TopicInfo
from exactlyonce.connectors.blocks.folder import CHECKPOINT_STORAGE, STORAGE, Folder
from exactlyonce.connectors.blocks.hdfs import HdfsFolder
from exactlyonce.connectors.blocks.local import LocalFolder
from exactlyonce.connectors.blocks.s3 import S3Folder
from exactlyonce.connectors.blocks.storage import FileStorage
from exactlyonce.pipeline.errors import InvariantViolation

_TOPIC_SUFFIX = ".checkpoints"


def file_storage(url: str, topic: TopicInfo) -> FileStorage:
    """The storage of the pipeline whose decisions are in *topic*, below *url*, as `storage_url` has made it."""
    topic_id = topic.topic_id.replace("/", "_").replace("+", "-")  # as Kafka's tools write it: without slashes
    inner = f"{topic.name.removesuffix(_TOPIC_SUFFIX)}/{topic_id}"
    return FileStorage(folder_of(url, inner, CHECKPOINT_STORAGE))


def folder_of(url: str, inner: str, what: str = STORAGE) -> Folder:
    """The folder *inner* below *url*, as `storage_url` has made it; its errors begin with *what* it is for."""
    scheme, host, path = parts_of(url)
    match scheme:
        case "file":
            return LocalFolder(Path("/", path), inner, what)
        case "s3":
            return S3Folder(host, f"{path}/{inner}" if path else inner, what)
        case "hdfs":
            return HdfsFolder(host, path, inner, what)
    raise InvariantViolation(f"no storage for {url}")
