"""JSON of what msgpack holds, also where a dict's keys are nothing that JSON has for names."""

from __future__ import annotations

import json

from exactlyonce.state.json_text import json_text


def test_keys_are_named_at_every_depth() -> None:
    value = {"days": [{(1, (True, None)): {False: b"\x00"}}, {2.5: "half", "[1]": 1}]}
    shown = {"days": [{"[1,[true,null]]": {"false": "AA=="}}, {"2.5": "half", "[1]": 1}]}
    assert json.loads(json_text(value)) == shown
