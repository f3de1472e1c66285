"""`exactlyonce mcp` answers the protocol's own client, and only reads."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import pytest

from exactlyonce.cli.commands.mcp import Questions
from tests.cli.conftest import Orders


def test_only_the_named_pipelines_can_be_asked_about() -> None:
    refused = pytest.importorskip("mcp.server.mcpserver.exceptions").ToolError
    one, two = Questions(["order-totals"], []), Questions(["orders:pipeline", "shipments"], [])
    for questions, pipeline in [(one, "os:system"), (two, "")]:
        with pytest.raises(refused, match="Name one of the pipelines"):
            questions.checkpoints(pipeline)
    with pytest.raises(refused, match="its code is not here"):
        one.explain()
    with pytest.raises(refused, match="is no operator's id"):
        one.state(operator="--help")


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_client_over_stdio(orders: Orders) -> None:
    """Each tool's answer, of a pipeline that was killed while its output was decided; nothing is changed by it."""
    client_of_mcp = pytest.importorskip("mcp")
    orders.killed_at("coordinator-decided")
    before = orders.kafka.topics(), orders.command("checkpoints", orders.name, "--json").out
    words = [
        "-m",
        "exactlyonce.cli.main",
        "mcp",
        "orders:pipeline",
        "--bootstrap-servers",
        orders.kafka.bootstrap_servers,
    ]
    server = client_of_mcp.StdioServerParameters(command=sys.executable, args=words, cwd=orders.command.folder)

    async def talk() -> dict[str, Any]:
        async with client_of_mcp.Client(server) as client:
            tools = (await client.list_tools()).tools
            assert all(tool.annotations.read_only_hint and tool.description for tool in tools)
            questions: dict[str, dict[str, Any]] = {tool.name: {} for tool in tools}
            answers = {name: await client.call_tool(name, given) for name, given in questions.items()}
            answers["keys"] = await client.call_tool("state", {"operator": "totals", "key": "c1"})
            answers["wrong"] = await client.call_tool("state", {"operator": "nothing"})
            return answers

    answers = asyncio.run(talk())
    assert {name for name, answer in answers.items() if answer.is_error} == {"wrong"}
    assert "nothing" in answers["wrong"].content[0].text
    assert f"{orders.name}-orders" in answers["explain"].content[0].text
    found = answers["checkpoints"].structured_content
    assert [each["state"] for each in found["checkpoints"]][-1:] == ["decided"]
    (waiting,) = answers["transactions"].structured_content["result"]
    assert waiting["decided_in"] == found["checkpoints"][-1]["checkpoint"]
    (total,) = answers["keys"].structured_content["result"]
    assert (total["key"], total["state"]) == ("c1", 100)
    assert answers["doctor"].structured_content["pipeline"] == orders.name
    assert (orders.kafka.topics(), orders.command("checkpoints", orders.name, "--json").out) == before
    assert json.loads(before[1])["checkpoints"]
