"""What stands between a child and its network: holds, cut links, slow links. Memory transports on virtual time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from swarmnet.errors import PeerTimeout
from swarmnet.ids import NO_CHAIN, Ballot, PeerId, RoundId
from swarmnet.messages import Commit, ManifestRequest, Packed, Running, SnapshotPiece, SnapshotRequest
from swarmnet.stage.interfaces import Engine, OuterStep
from swarmnet.telemetry.events import EventReader
from swarmnet.testing.doubles import FakeTransport, run_virtual
from swarmnet.testing.fault import OneWayCut, Partition, Slow
from swarmnet.testing.injector import BREAK_S, FaultyService, FaultyTransport, Interposed, held_engine
from swarmnet.testing.process_swarm import FaultOrders

pytestmark = pytest.mark.virtual_time

TOLD = ("hello", "again", "bye")


def piece(num_bytes: int) -> Packed:
    return Packed("uint8", (num_bytes,), bytes(num_bytes))


async def collect(transport: FaultyTransport, request: Any = None, payload: Any = (), *, deadline: float = 1e9) -> list:
    loop = asyncio.get_running_loop()
    return [
        (round(loop.time(), 3), answer)
        async for answer in transport.call("b", request or ManifestRequest(), payload, deadline=deadline)
    ]


def links(*cut: str, **paces: list[float]) -> dict[str, Any]:
    return {"t": 0.0, "event": "links", "cut": [*cut], "paces": paces}


def hold(id: str, phase: str, step: int, moment: str) -> dict[str, Any]:
    return {"t": 0.0, "event": "hold", "id": id, "phase": phase, "step": step, "moment": moment}


def go_on(id: str) -> dict[str, Any]:
    return {"t": 0.0, "event": "go_on", "id": id}


def test_orders_reach_a_child_by_its_file(tmp_path: Path) -> None:
    told, path = FaultOrders(trace=True), tmp_path / "orders"
    cut = Partition(step=0, between=(("s0-r0",), ("s0-r1",)), for_s=1.0)
    slow = Slow(step=0, peers=("s1",), bytes_per_s=1e5, latency_s=0.25, for_s=1.0)
    told.open("s0-r0", path)
    told.listening("s0-r1", "mate")
    told.cut(cut)
    told.cut(away := OneWayCut(step=0, senders=("s0-r9",), receivers=("s0-r0",), for_s=1.0))  # nothing new
    told.listening("s1-r0", "next")
    told.cut(slow)
    told.heal(away)
    told.send("s0-r0", "go_on", id="a")
    orders = [{**order, "t": 0.0} for order in EventReader(path).read()]
    assert orders == [{"t": 0.0, "event": "trace"}, links("mate"), links("mate", next=[1e5, 0.25]), go_on("a")]
    between = Interposed(print)
    for order in orders:
        between.take(order)
    assert between.cut == {"mate"}


async def test_a_link_as_it_is_passes_everything_at_once() -> None:
    wire = FakeTransport(b=["one", "two"])
    transport = FaultyTransport(wire, Interposed(print))
    for word in TOLD:
        transport.tell("b", word)
    assert [told.message for told in wire.told] == [*TOLD]
    assert await collect(transport) == [(0.0, "one"), (0.0, "two")]


async def test_a_cut_link_loses_what_is_told_and_breaks_calls_after_a_while() -> None:
    wire, between = FakeTransport(b="one"), Interposed(print)
    transport = FaultyTransport(wire, between)
    between.take(links("b"))
    transport.tell("b", "lost")
    transport.tell("c", "heard")
    assert [told[:2] for told in wire.told] == [("c", "heard")]
    with pytest.raises(PeerTimeout):
        await collect(transport)
    assert asyncio.get_running_loop().time() == pytest.approx(BREAK_S)
    with pytest.raises(PeerTimeout):
        await collect(transport, deadline=BREAK_S + 1.0)
    assert asyncio.get_running_loop().time() == pytest.approx(BREAK_S + 1.0)


async def test_a_call_survives_a_short_cut() -> None:
    between = Interposed(print)
    transport = FaultyTransport(FakeTransport(b="one"), between)
    between.take(links("b"))
    asyncio.get_running_loop().call_later(2.0, between.take, links())
    assert await collect(transport) == [(2.0, "one")]


async def test_a_slow_link_delays_in_order_and_paces_payloads_one_after_the_other() -> None:
    wire, between = FakeTransport(b=SnapshotPiece((piece(100),))), Interposed(print)
    transport, loop = FaultyTransport(wire, between), asyncio.get_running_loop()
    between.take(links(b=[100.0, 0.5]))
    transport.tell("b", TOLD[0])
    await asyncio.sleep(0.2)
    between.take(links())
    transport.tell("b", TOLD[1])  # fast by now, yet not before the first
    await asyncio.sleep(1.0)
    transport.tell("b", TOLD[2])
    assert wire.told == [("b", TOLD[0], 0.5), ("b", TOLD[1], 0.5), ("b", TOLD[2], 1.2)]

    between.take(links(b=[100.0, 0.5]))
    began = loop.time()
    async with asyncio.TaskGroup() as group:
        both = [group.create_task(collect(transport, payload=(piece(50),))) for _ in range(2)]
    ends = sorted(task.result()[-1][0] - began for task in both)
    # 0.5 s for each request, then 1 s for each answer, all on one link; latency once each way.
    assert ends == pytest.approx([2.5, 3.5], abs=0.01)
    assert all(isinstance(answer, Running) for task in both for _, answer in task.result()[:-1])
    with pytest.raises(PeerTimeout):
        await collect(transport, payload=(piece(10_000),), deadline=loop.time() + 2.0)


OUTER = OuterStep(elements=7, moved=0.5)


class Echo:
    """Compute, Summation and Service in one: does nothing, at once."""

    num_elements = 7

    async def forward(self, step: int, index: int, payload: Any, *, train: bool) -> str:
        return f"{step}.{index}"

    async def contribution(self, start: int, stop: int, reference: bytes = b"") -> str:
        return "mine"

    async def apply(self, commits: Any) -> OuterStep:
        return OUTER

    async def on_call(self, caller: str, request: Any, payload: Any) -> Any:
        yield SnapshotPiece((piece(1),))

    def on_reached(self, peer: str) -> None:
        self.reached = peer

    def on_gone(self, peer: str, *, definite: bool) -> None:
        self.gone = peer, definite


def both(between: Interposed) -> tuple[Any, Any]:
    engine = held_engine(Engine(Echo(), Echo()), between)  # type: ignore[arg-type]
    return engine.compute, engine.sums


async def test_a_child_holds_once_where_it_was_told_to_and_goes_on_when_told() -> None:
    said: list[tuple[str, dict[str, Any]]] = []
    between = Interposed(lambda event, **fields: said.append((event, fields)))
    engine, sums = both(between)
    assert sums.num_elements == 7
    between.take(hold("h", "forward", 2, "end"))
    loop = asyncio.get_running_loop()
    loop.call_later(3.0, between.take, go_on("h"))
    assert await engine.forward(1, 0, (), train=True) == "1.0"
    assert await engine.forward(2, 0, (), train=False) == "2.0" and said == []
    async with asyncio.TaskGroup() as group:
        held = group.create_task(engine.forward(3, 0, (), train=True))
        await asyncio.sleep(0)
        assert said == [("reached", {"hold": "h", "phase": "forward", "step": 3})]
        assert await engine.forward(3, 1, (), train=True) == "3.1" and loop.time() == 0.0
    assert held.result() == "3.0" and loop.time() == 3.0


def test_what_an_update_says_passes_through_the_layer() -> None:
    """Of local sync: without it the replica's log and metrics would miss each outer step of a run with faults."""
    commits = [Commit(0, 3, NO_CHAIN, RoundId(Ballot(0, PeerId("")), 0), b"", 1, 0.0, 0.0, frozenset())]
    assert run_virtual(both(Interposed(print))[0].apply(commits)) is OUTER


async def test_two_holds_of_one_phase_are_each_reached_by_one_call() -> None:
    """The first call is held at the first; while it is, another takes the second."""
    said: list[object] = []
    between = Interposed(lambda event, **fields: said.append(fields["hold"]))
    engine, _ = both(between)
    for name in ("one", "two"):
        between.take(hold(name, "forward", 2, "end"))
    loop = asyncio.get_running_loop()
    loop.call_later(1.0, between.take, go_on("one"))
    loop.call_later(2.0, between.take, go_on("two"))
    async with asyncio.TaskGroup() as group:
        for index in range(3):
            group.create_task(engine.forward(2, index, (), train=True))
    assert said == ["one", "two"] and loop.time() == 2.0


async def test_what_is_revoked_before_it_was_reached_holds_nobody() -> None:
    between = Interposed(print)
    between.take(hold("h", "averaging", 0, "begin"))
    between.take(go_on("h"))
    assert await both(between)[1].contribution(0, 1) == "mine"


async def test_state_is_held_at_both_ends_of_its_way() -> None:
    said: list[str] = []
    between = Interposed(lambda event, **fields: said.append(fields.get("hold", event)))
    for phase in ("snapshot", "fetch"):
        between.take(hold(phase, phase, 5, "end"))
    loop = asyncio.get_running_loop()
    loop.call_later(1.0, between.take, go_on("snapshot"))
    loop.call_later(2.0, between.take, go_on("fetch"))
    service, wire = FaultyService(Echo(), between), FakeTransport(b=SnapshotPiece((piece(1),)))
    assert [answer async for answer in service.on_call("a", SnapshotRequest(0), None)] and loop.time() == 1.0
    transport = FaultyTransport(wire, between)
    assert await collect(transport, SnapshotRequest(0)) == [(2.0, wire.peers["b"])]
    await collect(transport, SnapshotRequest(0))
    assert said == ["snapshot", "asking", "fetch"]


def test_behind_a_cut_link_death_is_silence() -> None:
    between, inner = Interposed(print), Echo()
    service = FaultyService(inner, between)
    service.on_gone("b", definite=True)
    assert inner.gone == ("b", True)
    service.on_reached("b")
    assert inner.__dict__.pop("reached") == "b"
    run_virtual(cut(between))
    service.on_gone("b", definite=True)
    assert inner.gone == ("b", False)
    service.on_reached("b")
    assert not hasattr(inner, "reached"), "an answer cannot have come through a cut"


async def cut(between: Interposed) -> None:
    between.take(links("b"))
