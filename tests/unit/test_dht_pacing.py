"""A DHT node serves each caller so many keys a second, and an honest caller of a large run needs many."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hivemind.p2p import P2P, PeerID

from swarmnet.ids import RunId
from swarmnet.net.dht_node import PacedP2P
from swarmnet.net.identity import Identity
from swarmnet.net.records import TRAINERS, dht_key

RUN = RunId("ab" * 32)


class Node(PacedP2P):
    def __del__(self) -> None:
        """There is no daemon to end."""


def served(lookups: int, keys: list[str], node: PacedP2P, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many of these lookups a node answers to one caller that sends them at once."""
    handlers: list[Any] = []

    async def keep(self: P2P, name: str, handler: Any) -> None:
        handlers.append(handler)

    async def answer(request: Any, context: Any) -> str:
        return "found"

    async def story() -> int:
        await node.add_protobuf_handler("rpc_find", answer)
        caller = SimpleNamespace(remote_id=PeerID.from_base58(Identity.generate().peer))
        calls = [handlers[0](SimpleNamespace(keys=keys), caller) for _ in range(lookups)]
        return (await asyncio.gather(*calls, return_exceptions=True)).count("found")

    monkeypatch.setattr(P2P, "add_protobuf_handler", keep)
    return asyncio.run(story())


def keys_of(num_stages: int) -> list[str]:
    return [dht_key(RUN, str(stage)) for stage in range(num_stages)] + [dht_key(RUN, TRAINERS)]


@pytest.mark.parametrize("num_stages", [110, 1000])
@pytest.mark.parametrize("mine", ["own", "held"])
def test_an_honest_caller_of_a_large_run_is_served(num_stages: int, mine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads every stage at each look, a few times within a moment when it starts. `held`: a node without a run."""
    node, keys = Node(), keys_of(num_stages)
    setattr(node, mine, keys)
    assert served(4, keys, node, monkeypatch) == 4


def test_a_caller_that_reads_another_large_run_is_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node()
    node.own = keys_of(3)
    assert served(4, keys_of(1000), node, monkeypatch) == 0
