"""What `swarmnet plan` says of rounds is what the averaging code takes: every kind of codec, sync mode and reducer, of
one rank and of several. And it lies in host memory, wherever ranks compute."""

from __future__ import annotations

import itertools
from typing import Any, cast

import pytest
import torch
from at_once import AtOnce, JobsAtOnce
from further import further
from no_ranks import NoRanks
from test_plan import CPU, GPU, MODEL, RUN, allocated

from swarmnet.ids import Ballot, Chain, PeerId, RoundId
from swarmnet.manifest.schema import Averaging, Manifest, Numerics, Training
from swarmnet.messages import Commit
from swarmnet.plan.memory import Setup, plan_stage
from swarmnet.ranks.device_backend import DeviceBackend
from swarmnet.ranks.host_copies import HostCopies, copied
from swarmnet.ranks.layout import MeshLayout
from swarmnet.stage.canonical import Canonical
from swarmnet.stage.interfaces import Contribution
from swarmnet.stage.passes import MemoryPolicy
from swarmnet.stage.state import State
from swarmnet.sums.local_sum import LocalSum
from swarmnet.sums.references import TURNS
from swarmnet.sums.step_sum import StepSum

pytestmark = pytest.mark.usefixtures("one_thread")
WIDE = RUN.model_copy(
    update={
        "model": MODEL.model_copy(update={"hidden_size": 128, "intermediate_size": 352}),
        "training": Training(total_steps=3, microbatches=1),
    }
)


def run_of(averaging: Averaging, **update: Any) -> Manifest:
    numerics = Numerics(mode="fp32" if averaging.sync == "local" else "deterministic")
    return WIDE.model_copy(update={"averaging": averaging, "numerics": numerics, **update})


PIECE = 16384  # elements that travel together: little beside the whole
CACHED = 16 << 16  # bytes: what is gone through at once, as integers and in fp64
ROUNDS = [RoundId(Ballot(ballot, PeerId("me")), 0) for ballot in range(2)]
LOCAL: dict[str, Any] = {"sync": "local", "inner_steps": 1, "outer_warmup_steps": 0}


class Counted:
    """A sum of gradients that is there, whichever step's."""

    discards = 0

    def __init__(self, flat: torch.Tensor) -> None:
        self._flat = flat

    def read(self, step: int) -> torch.Tensor:
        return self._flat

    def indexes(self, step: int) -> frozenset[int]:
        return frozenset({0})


def train(manifest: Manifest, sums: AtOnce) -> None:
    """All steps of a replica that is alone: in each a round that is given up, another, and what follows it."""
    for step in range(manifest.training.total_steps):
        for each in ROUNDS:
            sums.open_round(each)
            digest, square = sum_up(sums)
        sums.apply(
            [
                Commit(stage, step, Chain(""), each, digest, num_tokens=1, loss_sum=0.0, grad_sq_norm=square)
                for stage in range(manifest.cut.stages)
            ]
        )


def sum_up(sums: AtOnce) -> tuple[bytes, float]:
    """A round of one member, piece by piece."""
    sums.open_sum()
    for first, last in itertools.pairwise(itertools.accumulate(sums.phases, initial=0)):
        for start in range(first, last, PIECE):
            stop = min(start + PIECE, last)
            given = Contribution(PeerId("me"), 1, sums.contribution(start, stop))
            sums.put(start, sums.reduce([given], start, stop).packed)
    return sums.seal()


ON_RANKS = [
    Averaging(codec="int64"),
    Averaging(codec="fp32", **LOCAL),
    Averaging(codec="sparse:0.05", **LOCAL),
    Averaging(codec="nf4", **LOCAL),
    Averaging(codec="fp32", partners="pairs", **LOCAL),
]
"""Of each kind one: what a peer of several ranks has in another place is its weights."""


@pytest.mark.parametrize(
    ("averaging", "ranks"),
    [
        *((each, 2) for each in ON_RANKS),
        *further(*((each, 1) for each in ON_RANKS)),
        *(
            (each, 1)
            for each in (
                Averaging(codec="int64", sync="overlap"),
                Averaging(codec="fp32", reducer="centered_clip", **LOCAL),
                Averaging(codec="nf4", partners="pairs", **LOCAL),
                Averaging(codec="fp32", **LOCAL | {"inner_steps": 2, "fragments": 2}),
            )
        ),
    ],
    ids=lambda value: (
        "-".join(str(each) for name, each in value.model_dump(exclude_defaults=True).items() if "step" not in name)
        if isinstance(value, Averaging)
        else str(value)
    ),
)
def test_rounds_take_what_was_planned(averaging: Averaging, ranks: int) -> None:
    # References are all there once every draw of partners has had its turn.
    training = WIDE.training.model_copy(update={"total_steps": TURNS + 2 if averaging.gossip else 3})
    manifest = run_of(averaging, training=training)
    canonical = Canonical.of(manifest.of_stage(1))
    flat = torch.randn(canonical.num_elements, generator=torch.Generator().manual_seed(1))
    if manifest.numerics.integers:
        flat = (flat * 2.0**32).long()
    counted: Any = Counted(flat)
    own = DeviceBackend(manifest.of_stage(1), device=CPU).state
    own.reset_to_seed()
    memory = {name: torch.zeros(copied(canonical).num_bytes, dtype=torch.uint8) for name in ("copy0", "copy1")}
    finished, jobs = torch.zeros_like(flat), JobsAtOnce()

    def run() -> StepSum | LocalSum:
        ranks_ = cast(Any, NoRanks())
        copies = HostCopies(canonical, ranks_, memory | {"finished": finished, "reading": flat})
        state = own if ranks == 1 else State(canonical, copies, torch.zeros(2, 1))
        sums = (
            LocalSum(jobs, state, counted, device=CPU)
            if averaging.sync == "local"
            else StepSum(jobs, state, [counted] * (1 + averaging.delay.most), memory=finished)
        )
        train(manifest, AtOnce(sums))
        return sums

    layout = MeshLayout(ranks, devices=("cpu",) * ranks)
    _, _, most = allocated(run)
    assert (
        0
        <= most - plan_stage(Setup(manifest.specs, manifest.wire, layout), 1).host["rounds"]
        < CACHED
        < 4 * canonical.num_elements
    )


@pytest.mark.parametrize("averaging", [Averaging(codec="int64"), Averaging(codec="fp32", **LOCAL)])
def test_what_rounds_hold_is_in_host_memory_of_a_gpu(averaging: Averaging) -> None:
    """So is the finished aggregate, if there is one; outer weights and momentum are where the weights are."""
    manifest = run_of(averaging)
    here, there = (plan_stage(Setup(manifest.specs, manifest.wire, layout), 1) for layout in (MeshLayout(), GPU))
    size = 4 * Canonical.of(manifest.of_stage(1)).num_elements
    local = averaging.sync == "local"
    wide = size * (1 if local else 2)
    assert there.host["rounds"] == here.host["rounds"] >= 2 * size * local
    assert (here.rank.sums, here.host["sums"]) == (wide * (2 - local), 0)
    assert (there.rank.sums, there.host["sums"]) == (wide, wide * (not local))
    assert [plan.rank.optimizer // size for plan in (here, there)] == [2, 2]
    assert [plan.rank.parameters for plan in (here, there)] == [size * (1 + 2 * local)] * 2


def test_an_outer_optimizer_is_not_offloaded_with_the_moments() -> None:
    manifest = run_of(Averaging(codec="fp32", **LOCAL))
    size = 4 * Canonical.of(manifest.of_stage(1)).num_elements
    plain, offloaded = (
        plan_stage(Setup(manifest.specs, manifest.wire, GPU, memory=MemoryPolicy(offload_optimizer=offload)), 1)
        for offload in (False, True)
    )
    assert plain.rank.state - offloaded.rank.state == plain.rank.optimizer == offloaded.host["moments"] - 2 * size
    assert plain.rank.optimizer == pytest.approx(2 * size, rel=0.01)
