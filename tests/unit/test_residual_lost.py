"""Ranks die, and what their replica owes stays: whenever they do, applied + owed = computed.

Several replicas of a stage run their `StepSum`s over the sums of ranks that a test kills when it likes. Gradients that
were lost are counted again by whoever claims them.
"""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from at_once import AtOnce, JobsAtOnce
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnet.errors import Refused, RejectCode
from swarmnet.ids import Ballot, Chain, PeerId, RoundId
from swarmnet.manifest.schema import Averaging, Cut, Manifest, Model, Numerics, Training
from swarmnet.messages import Commit, Packed
from swarmnet.ranks.backend import RankSum, SumReading
from swarmnet.ranks.supervisor import RankSupervisor
from swarmnet.stage.canonical import Canonical
from swarmnet.stage.rounding import MAX_SUM, NoRounding
from swarmnet.stage.seams import Contribution
from swarmnet.sums.step_sum import StepSum

CODECS = ("topk:0.02", "nf4", "powersgd:4")
MICROBATCHES, PARTS = 4, 3
WHENS = ("never", "before", "begun", "half", "sent", "whole", "late", "committed", "applying")


def manifest_of(codec: str) -> Manifest:
    return Manifest(
        model=Model(
            vocab_size=64, hidden_size=64, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16
        ),
        cut=Cut(stages=1),
        training=Training(microbatches=MICROBATCHES, microbatch_size=1, sequence_length=8),
        numerics=Numerics(mode="fp32"),
        averaging=Averaging(codec=codec),
    )


class State:
    """`stage.backend.State` of which nothing is asked but the version, and what was applied."""

    outer, newest = None, ()

    def settle(self) -> None:
        """There is nothing to wait for."""

    def __init__(self, canonical: Canonical) -> None:
        self.canonical, self.version = canonical, 0
        self.applied = torch.zeros(canonical.num_elements, dtype=torch.float64)

    def most(self, num_microbatches: int) -> int:
        return MAX_SUM

    def square_norm(self, total: torch.Tensor) -> float:
        return self.canonical.square_norm(total, NoRounding())

    def apply(self, total: torch.Tensor, commits: list[Commit]) -> None:
        self.applied += total.double()
        self.version += 1


class Replica:
    """A replica on ranks. counts: the microbatches in each open step's sum, as its machine knows them."""

    def __init__(self, manifest: Manifest, name: str, *, ahead: int) -> None:
        self.me, self.state = PeerId(name), State(Canonical.of(manifest.of_stage(0)))
        self.held: dict[int, torch.Tensor] = {}  # on the ranks, by step
        self.reading = SumReading(torch.zeros(self.state.canonical.num_elements))
        ranks = cast(RankSupervisor, SimpleNamespace(lock=threading.RLock()))
        self.sums = [RankSum(ranks, self.reading, self._write) for _ in range(1 + ahead)]
        memory = torch.zeros(self.state.canonical.num_elements)
        self.sum = AtOnce(
            StepSum(
                JobsAtOnce(),  # type: ignore[arg-type]
                self.state,  # type: ignore[arg-type]
                self.sums,
                memory=memory,
            )
        )
        self.counts: dict[int, set[int]] = {}

    def _write(self, step: int, voids: int) -> None:
        self.reading.flat.copy_(self.held[step])

    @property
    def residual(self) -> torch.Tensor:
        return self.sum.codec.memory["averaging.residual"].clone()

    def of(self, step: int) -> RankSum:
        return self.sums[step % len(self.sums)]

    def count(self, step: int, index: int, gradient: torch.Tensor) -> None:
        total = self.of(step)

        def add() -> None:
            self.held[step] = self.held.get(step, 0) + gradient

        assert total.add(add, step=step, index=index, voids=total.voids)
        self.counts.setdefault(step, set()).add(index)

    def die(self) -> None:
        """The ranks are gone; nobody here has heard of it."""
        self.held.clear()
        for total in self.sums:
            total.lose()

    def hear(self, *, applying: bool = False) -> None:
        """What the machine of each open step does then."""
        oldest = self.state.version
        for step in range(oldest + applying, oldest + len(self.sums)):
            self.of(step).void(lost=True)
            self.counts.pop(step, None)


class Swarm:
    """Replicas of one stage, step by step."""

    def __init__(self, codec: str, size: int, *, ahead: int, seed: int) -> None:
        manifest = manifest_of(codec)
        self.replicas = [Replica(manifest, f"peer{place}", ahead=ahead) for place in range(size)]
        self.ahead, self.seed, self.numbers = ahead, seed, itertools.count()
        self.num_elements = self.replicas[0].state.canonical.num_elements
        self.computed = torch.zeros(self.num_elements, dtype=torch.float64)
        self.gradients: dict[tuple[int, int], torch.Tensor] = {}

    def gradient(self, step: int, index: int) -> torch.Tensor:
        key = step, index
        if key not in self.gradients:
            seeded = torch.Generator().manual_seed(self.seed + 1000 * step + index)
            self.gradients[key] = torch.randn(self.num_elements, generator=seeded)
        return self.gradients[key]

    def compute(self, step: int, turn: int) -> None:
        """What nobody counts is counted by somebody."""
        counted = set().union(*(replica.counts.get(step, set()) for replica in self.replicas))
        for index in set(range(MICROBATCHES)) - counted:
            self.replicas[(index + turn) % len(self.replicas)].count(step, index, self.gradient(step, index))

    def die(self, victim: Replica, times: int) -> None:
        for _ in range(times):
            victim.die()

    def step(self, when: str, who: int, *, times: int, turn: int) -> None:
        """One step, in the course of which the ranks of `who` die `times` times, at that moment."""
        version, victim = self.replicas[0].state.version, self.replicas[who % len(self.replicas)]
        self.compute(version, turn)
        if self.ahead:
            self.compute(version + 1, turn + 1)
        if when == "before":
            self.die(victim, times)
            victim.hear()
        elif when in ("begun", "half"):
            self.broken_round(victim, version, times, parts=0 if when == "begun" else 1)
        self.compute(version, turn + 1)
        round_id, whole = self.round(version, victim, when, times)
        for replica in self.replicas:
            if replica not in whole:
                replica.sum.install([whole[0].sum.finished_sum(0, self.num_elements)])
        if when == "committed":
            self.die(victim, times)
            victim.hear()
        elif when == "applying":
            self.die(victim, times)
            victim.hear(applying=True)
        commit = Commit(0, version, Chain(""), round_id, b"", 1, 0.0, 1.0)
        for replica in self.replicas:
            replica.sum.apply([commit])
            replica.counts.pop(version, None)
            replica.held.pop(version, None)
        self.computed += sum(self.gradient(version, index).double() for index in range(MICROBATCHES))

    def begin(self, round_id: RoundId) -> None:
        for replica in self.replicas:
            replica.sum.open_round(round_id)
            replica.sum.open_sum()

    def members(self, step: int) -> list[Replica]:
        return [replica for replica in self.replicas if replica.counts.get(step)]

    def edges(self, phase: int) -> list[tuple[int, int]]:
        first, last = list(itertools.pairwise(itertools.accumulate(self.replicas[0].sum.phases, initial=0)))[phase]
        cut = [first + (last - first) * part // PARTS for part in range(PARTS + 1)]
        return list(itertools.pairwise(cut))

    def broken_round(self, victim: Replica, step: int, times: int, *, parts: int) -> None:
        """A round of which the victim has sent no more than `parts` parts, in the last phase, as its ranks die."""
        self.begin(RoundId(Ballot(1, PeerId("keeper")), next(self.numbers)))
        phases = len(victim.sum.phases)
        for phase in range(phases - 1):
            self.sum_phase(step, phase)
            for replica in self.replicas:
                replica.sum.next_phase()
        for start, stop in self.edges(phases - 1)[:parts]:
            for replica in self.members(step):
                replica.sum.contribution(start, stop)
        counted = victim.counts.get(step)
        self.die(victim, times)
        if counted:
            self.refused(victim)
        victim.hear()
        if counted:
            self.refused(victim)  # a job of that round that comes late

    def refused(self, victim: Replica) -> None:
        with pytest.raises(Refused) as caught:
            victim.sum.contribution(*self.edges(0)[0])
        assert caught.value.code is RejectCode.NOT_READY

    def round(self, step: int, victim: Replica, when: str, times: int) -> tuple[RoundId, list[Replica]]:
        """A round that becomes whole: its id, and where. sent: the victim's ranks die when it has contributed all.
        whole: when it has been told all, too. late: the same, and the next round has begun before it is known that this
        one is whole, with one of them."""
        round_id = RoundId(Ballot(1, PeerId("keeper")), next(self.numbers))
        self.begin(round_id)
        phases = len(victim.sum.phases)
        for phase in range(phases):
            if phase:
                for replica in self.replicas:
                    replica.sum.next_phase()
            dies = when == "sent" and phase == phases - 1
            self.sum_phase(step, phase, dying=victim if dies else None, times=times)
        if when in ("whole", "late"):
            self.die(victim, times)
            victim.hear()
        ends = [victim] if when in ("sent", "whole", "late") else []  # without having heard that it is whole
        others = [replica for replica in self.replicas if replica not in ends]
        sealed = {replica.sum.seal() for replica in others}
        assert len(sealed) == 1
        if when == "late":
            self.next_round(step, others[:1])
            return round_id, others[:1]
        return round_id, others

    def next_round(self, step: int, apart: list[Replica]) -> None:
        """All but those begin a round in which they send nothing, and send much in another; nobody ends it."""
        self.compute(step, 0)
        rest = [replica for replica in self.replicas if replica not in apart]
        for _ in range(2):
            round_id = RoundId(Ballot(1, PeerId("keeper")), next(self.numbers))
            for replica in rest:
                replica.sum.open_round(round_id)
        for span in self.edges(0):
            sent = [(replica.me, replica.sum.contribution(*span)) for replica in rest if replica.counts.get(step)]
            given = [Contribution(peer, 1, packed) for peer, packed in sent]
            rest[0].sum.reduce(given, *span)

    def sum_phase(self, step: int, phase: int, *, dying: Replica | None = None, times: int = 0) -> None:
        spans = self.edges(phase)
        sent: list[list[tuple[PeerId, Packed]]] = [
            [(replica.me, replica.sum.contribution(*span)) for replica in self.members(step)] for span in spans
        ]
        if dying is not None:
            self.die(dying, times)
        reduced = []
        for place, (span, contributions) in enumerate(zip(spans, sent, strict=True)):
            reducer = self.replicas[(place + step) % len(self.replicas)]  # the dying one too: it has not heard yet
            given = [Contribution(peer, 1, packed) for peer, packed in contributions]
            reduced.append((span[0], reducer.sum.reduce(given, *span).packed))
        if dying is not None:
            dying.hear()
        for start, packed in reduced:
            for replica in self.replicas:
                if replica is not dying:
                    replica.sum.put(start, packed)

    def check(self) -> None:
        """The law, up to the rounding of some fp32 additions per step."""
        applied = self.replicas[0].state.applied
        for replica in self.replicas:
            assert torch.equal(replica.state.applied, applied)
        owed = torch.stack([replica.residual.double() for replica in self.replicas]).sum(0)
        assert (applied + owed - self.computed).norm() <= 1e-5 * self.computed.norm()
        assert owed.norm() > 1e-3 * self.computed.norm()


@pytest.mark.parametrize("times", [1, 2], ids=["once", "twice"])
@pytest.mark.parametrize("ahead", [0, 1], ids=["exact", "overlap"])
@pytest.mark.parametrize("when", WHENS)
@pytest.mark.parametrize("codec", CODECS)
def test_a_loss_at_any_moment_leaves_what_is_owed(codec: str, when: str, ahead: int, times: int) -> None:
    swarm = Swarm(codec, 2, ahead=ahead, seed=5)
    for number in range(4):
        swarm.step(when if number in (1, 2) else "never", number, times=times, turn=number)
        swarm.check()


@settings(deadline=None, max_examples=25)
@given(
    codec=st.sampled_from(CODECS),
    size=st.integers(1, 3),
    ahead=st.integers(0, 1),
    seed=st.integers(0, 1 << 20),
    plan=st.lists(
        st.tuples(st.sampled_from(WHENS), st.integers(0, 2), st.integers(1, 2), st.integers(0, 3)),
        min_size=2,
        max_size=5,
    ),
)
def test_applied_and_owed_are_what_was_computed_in_every_order(
    codec: str, size: int, ahead: int, seed: int, plan: list[tuple[str, int, int, int]]
) -> None:
    swarm = Swarm(codec, size, ahead=ahead, seed=seed)
    for when, who, times, turn in plan:
        if size == 1 and when in ("sent", "whole", "late"):
            when = "committed"  # nobody else has the sum of a round that it did not hear the end of
        swarm.step(when, who, times=times, turn=turn)
        swarm.check()


@pytest.mark.parametrize("codec", CODECS)
def test_a_loss_leaves_the_residual_to_the_bit_and_a_void_drops_it(codec: str) -> None:
    swarm = Swarm(codec, 2, ahead=1, seed=1)
    for number in range(2):
        swarm.step("never", 0, times=0, turn=number)
    one, other = swarm.replicas
    before = one.residual
    for replica in (one, other):
        replica.die()
        replica.hear()
    swarm.begin(RoundId(Ballot(2, PeerId("keeper")), 0))
    assert torch.equal(one.residual, before) and bool(before.any())
    other.die()
    other.of(2).void()  # taken back by the keeper, before it has heard of the loss
    other.hear()
    one.of(3).void()  # of a step that has contributed nothing yet
    swarm.begin(RoundId(Ballot(2, PeerId("keeper")), 1))
    assert torch.equal(one.residual, before) and not bool(other.residual.any())
