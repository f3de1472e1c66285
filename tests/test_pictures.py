"""The pictures of the documentation are what their script draws."""

from __future__ import annotations

import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest
from drawing import COLOURS

from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.sinks.kafka.writer import SlotState

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
SCRIPT = runpy.run_path(str(PICTURES / "draw.py"))
NAMES = sorted(SCRIPT["PICTURES"])


def test_every_picture_is_drawn() -> None:
    assert sorted(path.name for path in PICTURES.glob("*.svg")) == NAMES


def test_the_pictures_have_what_the_code_has() -> None:
    assert set(SCRIPT["SLOT_WORDS"]) == set(SlotState)
    assert set(SCRIPT["KEPT"]) <= set(Manifest.__struct_fields__)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_checked_in_is_what_is_drawn(name: str) -> None:
    drawn = SCRIPT["PICTURES"][name]()
    assert (PICTURES / name).read_text() == drawn, "run: python docs/pictures/draw.py"
    assert ElementTree.fromstring(drawn).findtext("{http://www.w3.org/2000/svg}title")
    assert {drawn.count(f".{colour}{{fill:") for colour in COLOURS} == {2}
