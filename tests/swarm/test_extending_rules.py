"""The routing and the placement rule of docs/extending.md: a simulated swarm, and a joiner over a real DHT."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import extending_page
import pytest
from test_prepare_join import link, newcomer, peers, placed

from swarmnet.config import plug_in
from swarmnet.config.peer import PeerConfig
from swarmnet.errors import UsageError
from swarmnet.ids import PeerId
from swarmnet.manifest.schema import Manifest
from swarmnet.manifest.timers import Timers
from swarmnet.peer.placement import Choice, placement_rule
from swarmnet.peer.run import run_peer
from swarmnet.pipeline.router import Candidate, Router
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_swarm import VirtualSwarm
from swarmnet.trainer.run import run_trainer

TIMERS = Timers(suspect_s=2.0)


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extending_page.install(tmp_path / "site", monkeypatch)


def counted(routing: str, steps: int = 6) -> list[Counter[str]]:
    """By stage, microbatches that each replica counted in a swarm of two stages with two replicas each."""
    found = [Counter[str](), Counter[str]()]

    def hear(peer, event, fields) -> None:
        if event == "committed" and peer == f"s{fields['stage']}.{2 * fields['stage']}":
            found[fields["stage"]].update({name: len(indexes) for name, indexes in fields["contributions"]})

    swarm = VirtualSwarm(Plan(stages=2, replicas=2, steps=steps, routing=routing), seed=1)
    swarm.hooks.append(hear)
    swarm.run()
    return found


@pytest.mark.usefixtures("acme")
def test_peers_and_trainers_call_whom_the_rule_prefers_and_the_sums_are_those_of_one_process() -> None:
    """Trainers call stage 0, and its peers stage 1."""
    both = counted("least_time", steps=60)  # equal replicas: one more or less is a matter of milliseconds
    assert [stage.keys() for stage in both] == [{"s0.0", "s0.1"}, {"s1.2", "s1.3"}]
    assert all(stage.total() == 240 and min(stage.values()) >= 110 for stage in both)
    assert counted("acme.prefer:.2")[1] == {"s1.2": 24} and counted("acme.prefer:.3")[1] == {"s1.3": 24}
    assert counted("acme.prefer:.1")[0] == {"s0.1": 24}


@pytest.mark.usefixtures("acme")
async def test_a_joiner_takes_the_stage_that_the_rule_chooses(tmp_path: Path) -> None:
    async with peers(tmp_path, 1, 1, 2) as found:
        told: list[tuple[str, str]] = []
        config = newcomer(tmp_path / "me").model_copy(update={"placement": "acme.no_data"})
        place = await placed(config, link(found[0]), lambda name, text: told.append((name, text)))
        assert place.config.stages == (2,)
        assert told[-1] == ("stage", "2: stage 2 has the fewest replicas, 1")


@pytest.mark.usefixtures("acme")
def test_a_rule_that_is_not_there_or_chooses_what_it_may_not_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, line in (("acme.none", "no installed distribution has"), ("acme.prefer", "write acme.prefer:END")):
        for run in (run_peer, run_trainer):
            with pytest.raises(UsageError, match=f"^routing: routing rule {name}.*{line}"):
                run(PeerConfig(routing=name), Manifest())
    with pytest.raises(UsageError, match=r"^placement: placement rule acme\.none: no installed distribution has"):
        placement_rule("acme.none")
    monkeypatch.setattr(plug_in, "load", lambda kind, name, field: (lambda *_, **__: Choice(3, "why not"), name))
    with pytest.raises(UsageError, match=r"^placement: acme\.odd chose stage 3: of the run these fit here: 0, 1, 2"):
        placement_rule("acme.odd")(PeerId("me"), range(3), ())
    router = Router(TIMERS, rule=lambda candidates: PeerId("nobody"))
    router.update({PeerId("a"): 0})
    with pytest.raises(ValueError, match="chose 'nobody', which is none of its candidates"):
        router.pick(num_bytes=1, now=0.0)


def test_a_rule_sees_what_the_router_knows() -> None:
    seen: list[list[Candidate]] = []

    def rule(candidates: Sequence[Candidate]) -> PeerId:
        seen.append(list(candidates))
        return candidates[-1].peer

    router = Router(TIMERS, rule=rule)
    a, b = PeerId("a"), PeerId("b")
    router.update({a: 0, b: 3})
    first = router.pick(num_bytes=100, now=0.0)
    router.pick(num_bytes=100, now=0.0)
    router.done(first, seconds=0.2, compute_s=0.1, silence_s=0.2, now=0.2)
    router.pick(num_bytes=100, now=0.2)
    assert [(each.peer, each.queue, each.in_flight, each.measured) for each in seen[0]] == [
        (a, 0, 0, False),
        (b, 3, 0, False),
    ]
    assert seen[1][1].in_flight == 1 and seen[1][1].time_ns > seen[0][1].time_ns == 0
    assert seen[2][1].measured and seen[2][1].cost_ns == 100_000_000 == seen[2][0].cost_ns
