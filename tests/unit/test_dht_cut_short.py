"""A lookup cut short by its deadline leaves tasks to the garbage collector; what asyncio says of them is not logged."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace
from typing import Any

import pytest
from hivemind.dht.routing import DHTID
from hivemind.dht.traverse import traverse_dht

from swarmnet.net import dht_node

NODES = [DHTID.generate(source=f"node {number}") for number in range(4)]
KEY = DHTID.generate(source="key")


class Mute:
    """hivemind's own traversal over nodes that never answer, as on a machine too busy for it."""

    async def find_nearest_nodes(self, ids: list[DHTID]) -> Any:
        async def neighbours(peer: DHTID, queries: Any) -> Any:
            await answer

        answer = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.05, answer.set_result, None)  # so late that nobody wants it any more
        return await traverse_dht(
            ids, initial_nodes=NODES, beam_size=4, num_workers=3, queries_per_call=1, get_neighbors=neighbours
        )


async def test_nothing_is_said_of_what_a_lookup_leaves_behind(caplog: pytest.LogCaptureFixture) -> None:
    dht_node._quiet()
    node = dht_node.DhtNode(SimpleNamespace(), SimpleNamespace(), Mute(), (), set())  # type: ignore[arg-type]
    loop = asyncio.get_running_loop()
    assert await node._nearest([KEY], deadline=loop.time() + 0.01) is None
    await asyncio.sleep(0.1)
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []
