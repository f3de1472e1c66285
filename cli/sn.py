"""Sn of each source, as lists of checkpoints and savepoints show it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from exactlyonce.checkpoint.records.manifest import Manifest


def sn_by_source(manifest: Manifest) -> Mapping[str, str]:
    """By label, `topic[partition]=offset` of all partitions of a source."""
    found: dict[str, str] = {}
    for each in manifest.offsets:
        label, place = f"Sn of {each.source}", f"{each.topic}[{each.partition}]={each.offset}"
        found[label] = f"{found[label]} {place}" if label in found else place
    return found
