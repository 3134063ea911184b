"""A replica whose weights are not its mates' any more is found, named and repaired, and the run goes on exactly."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import pytest
from strike import node_of, until, watched

from swarmnet.ids import PeerId
from swarmnet.messages import Commit
from swarmnet.step import member
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_engine import SimulatedEngine
from swarmnet.testing.virtual_swarm import Node, VirtualSwarm

EVERY = 4


def plan(*, replicas: int = 3, steps: int = 16, drift_every: int = EVERY, resync_every: int = 0) -> Plan:
    """With last digits that may differ while everything that counts is exact."""
    return Plan(
        stages=2,
        replicas=replicas,
        microbatches=6,
        steps=steps,
        classes=2,
        forward_s=0.02,
        drift_every=drift_every,
        resync_every=resync_every,
        checkpoint_every=50,
    )


def spared(swarm: VirtualSwarm, *victims: PeerId) -> None:
    """The bits of these peers' weights are wrong on purpose, until they have taken others'."""
    check, off = swarm._check_weights, set(victims)

    def unless_off(peer: PeerId, fields: dict[str, object]) -> None:
        if fields.get("how") == "snapshot":
            off.discard(peer)
        if peer not in off:
            check(peer, fields)

    swarm._check_weights = unless_off  # type: ignore[method-assign]


def flip(node: Node) -> None:
    """A few of the last digits of its weights are others from now on."""
    node.engines[0].digits ^= 0b1011


def version(node: Node) -> int:
    return node.peer.replicas[0].member.version if 0 in node.peer.replicas else -1


def order(swarm: VirtualSwarm) -> list[Node]:
    """Replicas of stage 0 in the order of leaders."""
    member = swarm.replicas(0)[0].peer.replicas[0].member
    names = member.view.leader_order(member.term_chain, now=swarm.loop.time())
    return [node for name in names if (node := node_of(swarm, name)) is not None]


def said(swarm: VirtualSwarm, event: str, **wanted: object) -> list[tuple[float, PeerId, dict[str, object]]]:
    return [
        (at, who, fields)
        for at, who, name, fields in swarm.events
        if name == event and wanted.items() <= fields.items()
    ]


@pytest.mark.parametrize(("place", "sync"), [(0, "exact"), (2, "exact"), (2, "overlap")])
def test_the_odd_one_of_three_is_named_and_repaired(place: int, sync: Literal["exact", "overlap"]) -> None:
    """Also when it is the leader: two others are more. And where steps overlap."""
    swarm = watched(replace(plan(), sync=sync))
    victims: list[PeerId] = []

    async def script(swarm: VirtualSwarm) -> None:
        await until(lambda: min(map(version, swarm.replicas(0))) >= 5, every_s=0.01)
        victim = order(swarm)[place]
        victims.append(victim.peer_id)
        spared(swarm, victim.peer_id)
        flip(victim)

    swarm.run(script=script)
    victim, others = victims[0], [n.peer_id for n in swarm.replicas(0) if n.peer_id != victims[0]]
    named = said(swarm, "drift")
    assert {fields["peer"] for _, _, fields in named} == {victim}, "nobody else is off"
    assert {who for _, who, _ in named} > {victim}, "it says so itself, and so does another"
    assert {fields["version"] for _, _, fields in named} == {8}, "at the first measure after it"
    assert [who for _, who, _ in said(swarm, "resync", reason="drift")] == [victim]
    healed = said(swarm, "synced", stage=0, how="snapshot")
    assert [who for _, who, _ in healed] == [victim] and healed[0][2]["version"] <= 8 + EVERY
    digits = {node.engines[0].digits for node in swarm.replicas(0)}
    assert len(digits) == 1 and set(others) < {node.peer_id for node in swarm.replicas(0)}


def test_a_replica_that_is_off_again_after_each_repair_is_repaired_less_and_less_often() -> None:
    swarm = watched(plan(steps=60, drift_every=2))
    swarm._check_weights = lambda peer, fields: None  # type: ignore[method-assign]

    async def script(swarm: VirtualSwarm) -> None:
        await until(lambda: min(map(version, swarm.replicas(0))) >= 5, every_s=0.01)
        victim = order(swarm)[2]

        def off_again(peer: PeerId, event: str, fields: dict[str, object]) -> None:
            if (peer, event) == (victim.peer_id, "synced"):
                flip(victim)

        swarm.hooks.append(off_again)
        flip(victim)

    swarm.run(script=script)
    at = [fields["version"] for _, _, fields in said(swarm, "resync", reason="drift")]
    gaps = [later - earlier for earlier, later in itertools.pairwise(at)]
    assert len(gaps) >= 4 and gaps[-1] == max(gaps)


def test_of_two_the_first_in_order_stands() -> None:
    swarm = watched(plan(replicas=2, steps=13))
    victims: list[PeerId] = []

    async def script(swarm: VirtualSwarm) -> None:
        await until(lambda: min(map(version, swarm.replicas(0))) >= 5, every_s=0.01)
        victim = order(swarm)[1]
        victims.append(victim.peer_id)
        spared(swarm, victim.peer_id)
        flip(victim)

    swarm.run(script=script)
    assert [who for _, who, _ in said(swarm, "resync", reason="drift")] == victims
    assert len({node.engines[0].digits for node in swarm.replicas(0)}) == 1


def test_three_with_three_different_states_agree_in_the_end_and_two_serve_at_any_time() -> None:
    swarm = watched(plan(steps=24))

    def two_serve(peer: PeerId, event: str, fields: dict[str, object]) -> None:
        if event == "resync":
            serving = [n for n in swarm.replicas(0) if n.peer.replicas[0].member.synced]
            assert len(serving) >= 2, "a minority at a time"

    swarm.hooks.append(two_serve)

    async def script(swarm: VirtualSwarm) -> None:
        await until(lambda: min(map(version, swarm.replicas(0))) >= 5, every_s=0.01)
        first, second, third = order(swarm)
        spared(swarm, second.peer_id, third.peer_id)
        flip(second)
        third.engines[0].digits ^= 1 << 12
        assert first.engines[0].digits not in (second.engines[0].digits, third.engines[0].digits)

    swarm.run(script=script)
    assert len(said(swarm, "resync", reason="drift")) == 2
    assert len({node.engines[0].digits for node in swarm.replicas(0)}) == 1


def test_what_is_off_at_the_last_version_is_repaired_after_it() -> None:
    swarm = watched(plan(steps=9, drift_every=100))

    async def script(swarm: VirtualSwarm) -> None:
        await until(lambda: min(map(version, swarm.replicas(0))) >= 7, every_s=0.01)
        victim = order(swarm)[2]
        spared(swarm, victim.peer_id)
        flip(victim)
        await until(lambda: said(swarm, "synced", stage=0, how="snapshot"), every_s=0.01)

    swarm.run(script=script)
    assert {fields["version"] for _, _, fields in said(swarm, "drift")} == {9}
    assert len({node.engines[0].digits for node in swarm.replicas(0)}) == 1


def test_replicas_that_agree_say_nothing_and_nobody_measures_unasked() -> None:
    for every in (EVERY, 0):
        swarm = watched(plan(steps=10, drift_every=every))
        swarm.run()
        assert not said(swarm, "drift") and not said(swarm, "resync")
        measured = [node.peer.replicas[0].member.drift.mine is not None for node in swarm.replicas(0)]
        assert measured == [bool(every)] * 3


def test_other_numerics_classes_take_the_leaders_state_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two machines round otherwise than the other two: their last digits are their own, between two meetings."""
    monkeypatch.setattr(member, "TERM_STEPS", 100)  # one term
    swarm = watched(plan(replicas=4, steps=24, drift_every=2, resync_every=10), 2)
    classes = {PeerId(f"s0.{n}"): "cuda" if n % 2 else "cpu" for n in range(4)}
    swarm.classes.update(classes)
    monkeypatch.setattr(swarm, "_check_weights", lambda peer, fields: None)
    apply = SimulatedEngine.apply

    async def otherwise(self: SimulatedEngine, commits: Sequence[Commit]) -> None:
        await apply(self, commits)
        if any(node.engines.get(0) is self and classes.get(node.peer_id) == "cuda" for node in swarm.nodes):
            self.digits ^= 1 << self.version % 8

    monkeypatch.setattr(SimulatedEngine, "apply", otherwise)
    went: dict[int, list[tuple[int, PeerId]]] = {}
    kept: dict[int, str] = {}

    def watch(peer: PeerId, event: str, fields: dict[str, object]) -> None:
        if event == "resync":
            assert fields["reason"] == "numerics"
            member = swarm.replicas(0)[0].peer.replicas[0].member
            at = int(str(fields["version"]))
            went.setdefault(at // 10, []).append((at, peer))
            kept[at // 10] = classes[member.view.leader_order(member.term_chain, now=swarm.loop.time())[0]]

    swarm.hooks.append(watch)
    swarm.run()
    assert went.keys() == {1, 2}
    for period, turns in went.items():
        assert {peer for _, peer in turns} == {peer for peer, of in classes.items() if of != kept[period]}
        assert len({at for at, _ in turns}) == 2, "one after the other, since one of four may be away"
    assert not said(swarm, "drift"), "between classes nobody is off"
