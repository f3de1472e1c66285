"""Savepoints as what is exported and restored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from exactlyonce.checkpoint.records.manifest import ChannelLog, Manifest
from exactlyonce.engines.savepoints.contents import TopicSavepoint
from exactlyonce.pipeline.errors import ConfigError


def test_records_on_their_way_are_never_left_behind(manifest_of: Callable[..., Manifest]) -> None:
    """A checkpoint that holds any is neither exported nor restored from: the error says how many, and what to do."""
    no_blocks: Any = None
    log = ChannelLog("task", 0, 5, ())
    with pytest.raises(ConfigError, match=r"Checkpoint 7 of totals holds 5 records.*--until latest"):
        TopicSavepoint(manifest_of("totals", channel_logs=(log,)), no_blocks, "cluster")
    assert TopicSavepoint(manifest_of("totals"), no_blocks, "cluster").saved.checkpoint == 7
