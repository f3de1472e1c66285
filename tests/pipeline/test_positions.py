"""Positions: one grammar, of which each setting takes a part."""

from __future__ import annotations

import re
from datetime import datetime, timezone

import pytest

from exactlyonce.errors import ConfigError
from exactlyonce.pipeline.positions import (
    BEGINNING,
    EARLIEST,
    GROUP,
    LATEST,
    OFFSETS,
    RUNNING,
    START,
    TIME,
    TO,
    UNTIL,
    Group,
    Position,
    Positions,
)

MOMENT = datetime(2026, 11, 1, tzinfo=timezone.utc)
NUMBERS: Position = {"t": {0: 7, 1: -1}}
WRITTEN: list[tuple[object, str, Position]] = [
    ("running", RUNNING, "running"),
    ("latest", LATEST, "latest"),
    ("earliest", EARLIEST, "earliest"),
    ("start", START, "start"),
    ("group:legacy-app", GROUP, Group("legacy-app")),
    ("2026-11-01", TIME, MOMENT),
    ("2026-11-01T01:00:00+01:00", TIME, MOMENT),
    (MOMENT, TIME, MOMENT),
    ('{"t": {"0": 7, "1": -1}}', OFFSETS, NUMBERS),
    ({"t": {0: 7, "1": -1}}, OFFSETS, NUMBERS),
]


@pytest.mark.parametrize("setting", [UNTIL, TO, BEGINNING], ids=lambda setting: setting.setting)
def test_a_setting_takes_its_forms_and_refuses_the_others(setting: Positions) -> None:
    for given, form, position in WRITTEN:
        if form in setting.forms:
            assert setting.read(given) == position
        else:
            with pytest.raises(
                ConfigError, match=f"^{setting.setting} is .*{re.escape(f'. Write one of: {setting}.')}"
            ):
                setting.read(given)


def test_a_run_that_is_to_end_at_a_time_is_told_which_command_does() -> None:
    with pytest.raises(
        ConfigError, match=r"^until is '2026-11-01', a time\. Write one of: running, latest\. To end at"
    ):
        UNTIL.read("2026-11-01")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (7, r"\. Write one of: latest, "),
        (None, r"\. Write one of: latest, "),
        ("group:", r"\. Write one of: latest, "),
        (datetime(2026, 11, 1), ", which has no time zone: append Z for UTC"),
        ("2026-11-01T00:00:00", ", which has no time zone: append Z for UTC"),
        ("{", ", which is no JSON: "),
        ({"t": 7}, ", which is no offsets by topic and partition: Expected `object`"),
        ({"t": {"a": 7}}, ", which is no offsets by topic and partition: Expected `int`"),
        ({"t": {0: -2}}, ", and partitions and offsets are 0 or more"),
    ],
)
def test_what_is_no_position(given: object, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"^to is .*{reason}"):
        TO.read(given)
