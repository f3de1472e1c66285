"""`exactlyonce state`: the state of a pipeline as a table and as lines of JSON, also of one that runs."""

from __future__ import annotations

import json
import signal
import socket
from contextlib import closing
from typing import NamedTuple
from urllib.error import HTTPError
from urllib.request import urlopen

import msgspec
import pytest

from exactlyonce.cli.commands.state import lines, row, table, type_text
from exactlyonce.cli.main import main
from exactlyonce.engines.savepoints.contents import KeptEntry, decoded, possible_keys
from exactlyonce.engines.savepoints.shown_state import OperatorView, key_views
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.keys import canonical_key
from exactlyonce.pipeline.shape import describe
from exactlyonce.pipeline.timers import FOREVER
from exactlyonce.state.chain import IndexHead
from exactlyonce.state.slots import GroupTimes
from exactlyonce.testing.cluster import LIMIT_S
from tests.cli.conftest import Orders, by_customer, wait_until


class Pair(NamedTuple):
    first: int
    second: int


class Place(msgspec.Struct, frozen=True):
    city: str


def test_a_dict_by_records() -> None:
    with pytest.raises(ConfigError, match="a dict whose keys are records"):
        decoded(msgspec.msgpack.encode({Place("Ulm"): 1}))


def test_decoded_by_schema() -> None:
    """The schema's notes on fields that are written by position apply within other values, too."""
    point = {"record": "Point", "fields": [["x", "int"], ["y", {"optional": "int"}]], "array": True}
    assert decoded(canonical_key([1, 2]), {"union": [point, "null"]}) == {"x": 1, "y": 2}
    assert decoded(canonical_key({"a": [1]}), {"dict": ["str", point]}) == {"a": {"x": 1}}
    assert decoded(canonical_key([[1, 2]]), {"list": point}) == [{"x": 1, "y": 2}]
    assert decoded(canonical_key([1, [1, 2]]), {"tuple": ["int", point]}) == [1, {"x": 1, "y": 2}]
    tagged = {**point, "tag": ["type", "Point"]}
    assert decoded(canonical_key([["Point", 1, 2]]), {"list": tagged}) == [{"x": 1, "y": 2}]
    assert decoded(canonical_key((1, 2)), describe(Pair)) == {"first": 1, "second": 2}
    assert decoded(canonical_key({"p": [1, 2], "q": 3}), {"record": "P", "fields": [["p", point]]}) == {
        "p": {"x": 1, "y": 2},
        "q": 3,
    }


def test_type_text() -> None:
    assert type_text(describe(dict[str, list[int] | None])) == "dict[str, list[int] | null]"
    assert type_text(describe(tuple[int, str])) == "tuple[int, str]"


def test_dicts_by_tuples() -> None:
    schema = describe(dict[tuple[str, int], list[int]])
    entry = KeptEntry(3, canonical_key("shop"), msgspec.msgpack.encode({("ann", 1): [4], ("bob", 2): []}), 1)
    head = IndexHead("totals", 41, 128, schema)
    (key,) = key_views(head, [entry])
    assert row(key) == ("3", '"shop"', r'{"[\"ann\",1]":[4],"[\"bob\",2]":[]}')
    (line,) = lines(OperatorView("totals", 41, 2, 100, schema), [key])
    assert json.loads(line)["state"] == {'["ann",1]': [4], '["bob",2]': []}


def test_states_of_an_older_version() -> None:
    """Unchanged states are shown as they were written, with their version: today's schema says nothing of them."""
    head = IndexHead("totals", 41, 128, describe(Pair), version=2)
    entries = (KeptEntry(3, canonical_key("shop"), canonical_key([7, 8]), version) for version in (1, 2))
    old, new = key_views(head, entries)
    operator = OperatorView("totals", 41, 2, 100, head.schema, version=2)
    assert [row(each)[2] for each in (old, new)] == ["[7,8]", '{"first":7,"second":8}']
    assert [each.split()[-1] for each in table([old, new], operator)] == ["version", "1", "2"]
    assert table([new], operator)[0].split() == ["group", "key", "state"]
    head = IndexHead("totals", 41, 128, describe(tuple[int, int, int]), version=2)
    older = KeptEntry(3, canonical_key("shop"), canonical_key([7, 8]), 1)
    (line,) = lines(operator, key_views(head, [older]))
    assert (json.loads(line)["state"], json.loads(line)["version"]) == ([7, 8], 1)


def test_states_of_windows() -> None:
    """A session shows its accumulator alone; of hopping windows there are panes; a slot of other work is a time. With
    early or late results, what a window has had and what is new in windows are apart."""
    shown = []
    for meaning, slot, state in (
        ("session=5000", 12_999, [3_000, 8_000, 7]),
        ("hopping=60000 every=10000", 19_997, 7),
        ("tumbling=1 d offset=3600000 zone=Europe/Paris", 0, 7),
        ("tumbling=10000 early=4000 lateness=2000", 11_999, [[1, 7], {9_999: 7}]),
        ("process=time", FOREVER, [7, False, []]),
        ("deduplicate=1000 order=arrival", -1, 7),
    ):
        head = IndexHead("totals", 41, 128, "any", times=GroupTimes([], [], [], [], meaning))
        keys = [*key_views(head, [KeptEntry(3, canonical_key("ann"), msgspec.msgpack.encode(state), 1, slot)])]
        operator = OperatorView("totals", 41, 2, 100, "any", meaning=meaning)
        for line in table(keys, operator)[1:]:
            shown.append([cell.strip() for cell in line.split("  ") if cell.strip()])
    times = [
        ["1970-01-01 00:00:03.000", "1970-01-01 00:00:13.000"],
        ["1970-01-01 00:00:10.000", "1970-01-01 00:00:20.000"],
        ["1970-01-01 00:00:00.000", "1970-01-02 00:00:00.000"],
        *[["1970-01-01 00:00:00.000", "1970-01-01 00:00:10.000"]] * 2,
        ["-", "-"],
        ["-", "1970-01-01 00:00:00.000"],
    ]
    assert shown == [["3", '"ann"', *cells, "7"] for cells in times]
    (line,) = lines(operator, keys)
    assert (json.loads(line)["start"], json.loads(line)["end"]) == (None, "1970-01-01T00:00:00Z")


def test_states_of_an_older_version_by_avro_are_refused() -> None:
    head = IndexHead("totals", 41, 128, {"avro": "long"})
    with pytest.raises(ConfigError, match=r"kept by an Avro schema, which .* does not read any more. Run the pipeline"):
        list(key_views(head, [KeptEntry(3, canonical_key("shop"), b"\xc4\x01\x02", 1)]))


@pytest.mark.parametrize("limit", ["-1", "0", "two"])
def test_limit_that_limits_nothing(limit: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["state", "show", "p", "totals", f"--limit={limit}"])
    assert f"argument --limit: {limit!r}: write a whole number, 1 or more" in capsys.readouterr().err


def test_after_a_run(orders: Orders) -> None:
    orders.ran()

    def shown(*arguments: str) -> list[str]:
        return orders.command.done("state", "show", orders.name, *arguments).out.splitlines()

    assert shown()[-1].split()[::4] == ["totals", "int"]
    table = orders.command.done("state", "show", "orders:pipeline", "totals").out.splitlines()
    assert table[2].split() == ["group", "key", "state"]
    assert sorted(line.split()[1:] for line in table[3:]) == [[f'"c{number}"', "100"] for number in range(7)]
    assert orders.states() == by_customer(100)
    (one,) = shown("totals", "--key", "c3", "--json")
    assert one in shown("totals", "--json")
    assert shown("totals", "--limit", "2")[-1].startswith("and more")
    assert shown("totals", "--key", "c9")[-1].endswith("This key has no state.")

    for text, arguments in (
        ("Checkpoint 0 has no state of an operator 'totals'", ("totals", "--at", "0")),
        ("It has 0, 1", ("totals", "--at", "99")),
        ("Its operators with state are: totals.", ("total",)),
    ):
        orders.command.refused(text, "state", "show", orders.name, *arguments)


def test_serving(orders: Orders) -> None:
    orders.ran()
    serve = ("state", "serve", orders.name)
    orders.command.refused("beyond this machine", *serve, "--listen", "0.0.0.0:8086")
    orders.command.refused("--token names the place of the token", *serve, "--token", "secret")
    orders.command.refused("the environment has no variable NO_SUCH", *serve, "--token", "env:NO_SUCH")
    orders.command.refused("has no checkpoint", "state", "serve", f"{orders.name}-2")
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = orders.command.start(*serve, "--listen", f"127.0.0.1:{port}")
    try:
        assert process.stdout is not None
        assert f"http://127.0.0.1:{port}/state/OPERATOR/KEY answers for {orders.name}" in process.stdout.readline()
        with urlopen(f"http://127.0.0.1:{port}/state/totals/c3", timeout=LIMIT_S) as answer:
            assert json.loads(answer.read())["state"] == 100
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130


def test_serving_beside_a_run(orders: Orders) -> None:
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"

    def total() -> int | None:
        """None: the newest checkpoint has none yet."""
        try:
            with urlopen(f"http://{address}/state/totals/c3", timeout=LIMIT_S) as answer:
                return int(json.loads(answer.read())["state"])
        except HTTPError as error:
            if error.code != 404:
                raise
            return None

    with orders.running("--serve", address) as run:
        wait_until(lambda: total() == 100)
        assert run.stop() == 0
    orders.run_refused("0.0.0.0:8086 is beyond this machine", "--serve", "0.0.0.0:8086")


def test_a_key_that_nobody_has() -> None:
    assert len(possible_keys("[" * 3000)) == len(possible_keys("[" * 3000 + "]" * 3000)) == 1
    with pytest.raises(ConfigError, match="The key is no UTF-8"):
        possible_keys("\udcff")
