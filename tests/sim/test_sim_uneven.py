"""Averaging over lines of unequal width, by whole peers: what is exchanged comes to its end, and nothing is sent twice.

Four members of one stage, one of them behind a narrower line; sums are long enough for that to take seconds.
"""

from __future__ import annotations

import pytest

from swarmnet.ids import PeerId
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_swarm import Node, VirtualSwarm

MEMBERS, ELEMENTS, ELEMENT_BYTES = 4, 2_000_000, 8
VECTOR = ELEMENTS * ELEMENT_BYTES
FAST, SLOW = 10e6, 2e6
"""Bytes per second."""

NARROW = PeerId("s0.1")
MEASURED_STEP = 3
"""By then rounds are cut by what lines have carried: the narrow one reduces nothing."""


def play(*, steps: int, slow_up: float = SLOW, hook: object = None, seed: int = 3) -> VirtualSwarm:
    plan = Plan(stages=1, replicas=MEMBERS, microbatches=4 * MEMBERS, steps=steps, padding=ELEMENTS)
    swarm = VirtualSwarm(plan, seed)

    async def narrow(swarm: VirtualSwarm) -> None:
        for node in swarm.nodes:
            rates = (slow_up, SLOW) if node.peer_id == NARROW else (FAST, FAST)
            swarm.limit(node, up_bytes_per_s=rates[0], down_bytes_per_s=rates[1])

    if callable(hook):
        swarm.hooks.append(lambda *event: hook(swarm, *event))
    swarm.run(until_s=600.0, script=narrow)
    return swarm


def exchanges(swarm: VirtualSwarm) -> list[tuple[PeerId, str, float]]:
    return [
        (peer, event, float(str(fields["seconds"])))
        for _, peer, event, fields in swarm.events
        if event in ("averaged", "sum_left")
    ]


@pytest.mark.parametrize("steps", [2, 6])
def test_all_exchanges_that_begin_come_to_their_end_and_send_what_they_must(steps: int) -> None:
    swarm = play(steps=steps)
    assert [event for _, event, _ in exchanges(swarm)] == ["averaged"] * (MEMBERS * steps)
    sent = sum(int(str(fields["averaging_bytes"])) for _, _, event, fields in swarm.events if event == "applied")
    bound = steps * 2 * (MEMBERS - 1) * VECTOR
    assert 0.8 * bound < sent < 1.1 * bound, "of all; below it if a member had nothing to contribute"


class Blow:
    """Strikes a fast member that does not keep when the first holds the sum that the narrow one still waits for."""

    def __init__(self, *, kill: bool) -> None:
        self.kill, self.node, self.struck_at = kill, None, 0.0
        self.leader = PeerId("")

    def __call__(self, swarm: VirtualSwarm, peer: PeerId, event: str, fields: dict[str, object]) -> None:
        if event == "leader":
            self.leader = peer
        if self.node is None and event == "averaged" and fields["step"] == MEASURED_STEP:
            assert peer != NARROW
            self.node: Node | None = next(
                node for node in swarm.nodes if node.peer_id not in (peer, NARROW, self.leader)
            )
            self.struck_at = swarm.loop.time()
            (swarm.kill if self.kill else swarm.stop)(self.node)
            if not self.kill:
                swarm.loop.call_later(60.0, swarm.resume, self.node)


@pytest.mark.parametrize("kill", [True, False], ids=["killed", "stopped"])
def test_who_waits_for_a_member_that_is_gone_collects_from_a_holder_at_once(kill: bool) -> None:
    blow = Blow(kill=kill)
    # In this seed one holder's word does not overtake the news of the death: it would be waited for until `suspect_s`.
    swarm = play(steps=MEASURED_STEP + 2, slow_up=FAST, hook=blow, seed=4)
    assert (NARROW, "sum_left") in [(peer, event) for peer, event, _ in exchanges(swarm)]
    left_at = next(at for at, peer, event, _ in swarm.events if (peer, event) == (NARROW, "sum_left"))
    noticed_s = 1.0 if kill else 3.0 + 3 * 0.5  # a beat, a tick of the member, and one of its leader
    assert left_at - blow.struck_at < noticed_s, "refused connections are heard of at once, silence after `suspect_s`"
    whole_at = next(
        at
        for at, peer, event, fields in swarm.events
        if (peer, event, fields.get("step")) == (NARROW, "committed", MEASURED_STEP)
    )
    assert whole_at - left_at < 2 * VECTOR / SLOW + 2.0, "a vector on its line, summed again if too few hold it"
