"""A lookup that its deadline cuts short leaves no task behind that nobody ends."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace
from typing import Any

from hivemind.dht.routing import DHTID
from hivemind.dht.traverse import traverse_dht

from swarmnet.net.dht_node import DhtNode

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


async def test_what_waits_for_the_end_of_a_lookup_hears_of_it() -> None:
    complaints: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    node = DhtNode(SimpleNamespace(), SimpleNamespace(), Mute(), (), set())  # type: ignore[arg-type]
    before = asyncio.all_tasks()
    assert await node._nearest([KEY], deadline=loop.time() + 0.01) is None
    for _ in range(3):
        await asyncio.sleep(0)
    waiting = [task for task in asyncio.all_tasks() - before if "Event.wait" in repr(task.get_coro())]
    assert not waiting
    await asyncio.sleep(0.1)
    gc.collect()
    assert not complaints
