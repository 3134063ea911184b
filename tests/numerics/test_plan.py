"""What `swarmnet plan` predicts is at least what torch's allocator hands out, and not much more.

The allocator's own record (the profiler's memory events), not the process's resident memory, which is what the
allocator kept, too.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from at_once import JobsAtOnce
from benchmark_modules import load
from further import further
from torch.profiler import ProfilerActivity, profile

from swarmnet.config.fleet import MachineKind
from swarmnet.config.peer import Caps, PeerConfig
from swarmnet.errors import UsageError
from swarmnet.manifest.file import to_toml
from swarmnet.manifest.schema import Averaging, Cut, Manifest, Model, Numerics, Optimizer, Training
from swarmnet.model.comm import Comm
from swarmnet.peer import memory_fit
from swarmnet.peer.memory_fit import RESERVE, Capacity, judge, machine_fit, slots_that_fit, slots_within
from swarmnet.plan.memory import Setup, plan_stage, together
from swarmnet.ranks.comm import OneRank
from swarmnet.ranks.device_backend import DeviceBackend
from swarmnet.ranks.host_copies import COPIES, copied
from swarmnet.ranks.layout import MeshLayout
from swarmnet.ranks.stage import RankStage
from swarmnet.stage.canonical import Canonical
from swarmnet.stage.optimizer import StageOptimizer
from swarmnet.stage.passes import MemoryPolicy
from swarmnet.sums.step_sum import StepSum
from tests.contracts.thread_comm import run_ranks

CPU = torch.device("cpu")
ONE_CPU = PeerConfig(device="cpu")
live_bytes = load("live_bytes")
MODEL = Model(
    vocab_size=384, hidden_size=64, intermediate_size=176, num_layers=6, num_heads=4, num_kv_heads=2, head_dim=16
)
RUN = Manifest(model=MODEL, cut=Cut(stages=3), training=Training(microbatch_size=2, sequence_length=128))
POLICIES = ("save", "selective", "recompute_layers", "recompute", "offload")
STAGES = ("first", "middle", "last")

pytestmark = pytest.mark.usefixtures("one_thread")


def bounds(planned: int, measured: int) -> bool:
    """Is a plan no smaller than what was measured, and at most a third larger?"""
    return measured <= planned <= 1.34 * measured


def allocated(run: Callable[[], Any]) -> tuple[Any, int, int]:
    """What `run` returns, what of what it allocated is left, and the most that was there at any time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        answer = run()
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return answer, live, most


def inputs(manifest: Manifest, *, first: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    training = manifest.training
    tokens = torch.zeros(training.microbatch_size, training.sequence_length + 1, dtype=torch.int32)
    return tokens, None if first else boundary(manifest)


def boundary(manifest: Manifest) -> torch.Tensor:
    training = manifest.training
    shape = (training.microbatch_size, training.sequence_length, manifest.model.hidden_size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def made(manifest: Manifest, stage: int, policy: str) -> tuple[DeviceBackend, StepSum]:
    body = DeviceBackend(manifest.of_stage(stage), device=CPU, memory=MemoryPolicy(activations=policy))  # type: ignore[arg-type]
    return body, StepSum(
        JobsAtOnce(),  # type: ignore[arg-type]
        body.state,
        body.sums,
        memory=body.sum_memory(),
    )


def measured(manifest: Manifest, stage: int, policy: str, count: int) -> tuple[int, int]:
    """(state, peak) of a stage that really computes: `count` forwards, then all backwards, then weight passes."""
    last = stage == manifest.cut.stages - 1

    def make() -> tuple[DeviceBackend, StepSum]:
        return made(manifest, stage, policy)

    (body, _sums), state, _ = allocated(make)
    body.state.reset_to_seed()
    if manifest.numerics.compute == "bf16":  # the first microbatch leaves casts to the others
        passes(body, manifest, 1, last=last)
    _, _, most = allocated(lambda: passes(body, manifest, count, last=last))
    return state, state + most


def forwards(body: DeviceBackend, manifest: Manifest, count: int) -> list[object]:
    works: list[object] = []
    for _ in range(count):
        tokens, hidden = inputs(manifest, first=body.state.canonical.spec.first)
        work = body.forward(0, tokens, hidden, train=True)[1]
        assert work is not None
        works.append(work)
        del tokens, hidden, work
    return works


def passes(body: DeviceBackend, manifest: Manifest, count: int, *, last: bool) -> None:
    works = forwards(body, manifest, count)
    for work in works:
        body.backward(work, None if last else boundary(manifest))
    for index, work in enumerate(works):
        body.accumulate(work, step=0, index=index, discards=0)


@pytest.mark.parametrize("count", [3, *further(1)])
@pytest.mark.parametrize("stage", range(3), ids=STAGES)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_stage_takes_what_was_planned(policy: str, stage: int, count: int) -> None:
    setup = Setup(RUN.specs, RUN.wire, MeshLayout(), slots=count, memory=MemoryPolicy(activations=policy))  # type: ignore[arg-type]
    rank = plan_stage(setup, stage).rank
    state, peak = measured(RUN, stage, policy, count)
    assert rank.state == pytest.approx(state, rel=0.01)
    planned = rank.peak(count) + count * rank.offloaded - rank.state  # on the CPU both are one memory
    assert bounds(planned, peak - state)


@pytest.mark.parametrize(
    "change",
    [
        {"numerics": Numerics(compute="bf16")},
        {"numerics": Numerics(mode="fp32"), "averaging": Averaging(codec="int8")},
        {"averaging": Averaging(sync="overlap")},
        {"optimizer": Optimizer(state="8bit")},
    ],
    ids=["bf16", "fp32-sums", "overlap", "8-bit"],
)
def test_so_does_every_kind_of_run(change: dict[str, Any]) -> None:
    manifest = RUN.model_copy(update=change)
    setup = Setup(manifest.specs, manifest.wire, MeshLayout(), slots=2)
    plan = plan_stage(setup, 1)
    state, peak = measured(manifest, 1, "save", 2)
    rank = plan.rank
    assert plan.in_flight == 2 * (1 + manifest.averaging.delay.most)
    shared = MODEL_BF16 if manifest.numerics.compute == "bf16" else 0
    assert rank.state - shared * len(plan.layers) == pytest.approx(state, rel=0.02)
    assert bounds(rank.peak(2) - rank.state, peak - state)


@pytest.mark.parametrize("policy", ["save", "recompute"])
def test_stages_of_one_peer_take_what_was_planned_for_both_together(policy: str) -> None:
    """What both hold, and what one job takes: the earlier stage's microbatches wait, for backward or for their weight
    passes, while the later one computes all of its own."""
    setup = Setup(RUN.specs, RUN.wire, MeshLayout(), slots=2, memory=MemoryPolicy(activations=policy))  # type: ignore[arg-type]
    both, state, _ = allocated(lambda: [made(RUN, stage, policy) for stage in (1, 2)])
    earlier, later = (body for body, _ in both)
    earlier.state.reset_to_seed()
    later.state.reset_to_seed()

    def work(went_back: bool) -> None:
        waiting = forwards(earlier, RUN, 2)
        for each in waiting * went_back:
            earlier.backward(each, boundary(RUN))
        passes(later, RUN, 2, last=True)

    passing = max(allocated(functools.partial(work, went_back))[2] for went_back in (False, True))
    plans = [plan_stage(setup, stage) for stage in (1, 2)]
    planned = together(plans) - sum(plan.host_total for plan in plans)
    assert bounds(planned, state + passing)
    assert planned < sum(plan.rank.peak(2) for plan in plans), "one computes at a time"


MODEL_BF16 = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 176)  # casts of a layer's matrices


@pytest.mark.parametrize("policy", ["save", "recompute_layers"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole-tokens", "sequence-parallel"])
def test_so_does_a_rank_of_two(sequence_parallel: bool, policy: str) -> None:
    """Ranks are threads here, and torch's profiler records one: each counts its own storages."""
    layout = MeshLayout(2, 1, "none", sequence_parallel, ("cpu", "cpu"))
    memory = MemoryPolicy(activations=policy)  # type: ignore[arg-type]
    rank = plan_stage(Setup(RUN.specs, RUN.wire, layout, memory=memory), 1).rank

    def body(comm: Comm) -> tuple[int, int, int]:
        with live_bytes.LiveBytes() as live:
            stage = RankStage(RUN.of_stage(1), layout, tensor=comm, data=OneRank(), device=CPU, memory=memory)
            state = sum(live.take())
            canonical = Canonical.of(RUN.of_stage(1))
            stage.read_state(0, {name: torch.zeros(shape) for name, shape in canonical.state_shapes.items()})
            live.take()
            work = stage.forward(0, *inputs(RUN, first=False), train=True)[1]  # its output goes on to the next stage
            assert work is not None
            forward = live.take()
            stage.backward(work, boundary(RUN))
            backward = live.take()
            assert stage.accumulate(work, step=0, index=0, discards=0)
            held = max(sum(forward), sum(forward + backward))
            return state, held, live_bytes.highest(*forward, *backward, *live.take())

    for state, held, peak in run_ranks(2, body):
        assert rank.state == pytest.approx(state, rel=0.01)
        assert bounds(rank.microbatch, peak)
        table = boundary(RUN).nbytes  # where threads lay down tensors for each other, one still lies
        assert bounds(rank.held, held - table) or bounds(rank.held, held)


CHILD = """
import json, re, sys
from pathlib import Path
import torch
from swarmnet.manifest.file import load
from swarmnet.plan.memory import Setup, plan_stage
from swarmnet.peer.memory_fit import RESERVE
from swarmnet.ranks.layout import MeshLayout
from test_plan import RUN, made, passes

def most():
    # Not getrusage: that begins with what the parent process took.
    return 1024 * int(re.search("VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

torch.set_num_threads(1)
manifest, count = load(sys.argv[1]), 3
small, _ = made(RUN, 1, "save")  # loads what torch loads on first use
small.state.reset_to_seed()
passes(small, RUN, 1, last=False)
before = most()
body, sums = made(manifest, 1, "save")
body.state.reset_to_seed()
passes(body, manifest, count, last=False)
body.update(0, body.sums[0].read(0), scale=1e-6, rate=1e-6)
setup = Setup(manifest.specs, manifest.wire, MeshLayout(), slots=count)
print(json.dumps([plan_stage(setup, 1).rank.peak(count), RESERVE["cpu"], most() - before]))
"""


def test_a_process_takes_no_more_than_was_planned(tmp_path: Path) -> None:
    """Of the machine, as the kernel counts it: what the allocator keeps, too."""
    model = MODEL.model_copy(update={"hidden_size": 512, "intermediate_size": 1408, "num_heads": 8, "head_dim": 64})
    (tmp_path / "run.toml").write_text(to_toml(RUN.model_copy(update={"model": model})), encoding="utf-8")
    paths = {"PYTHONPATH": os.pathsep.join(path or "." for path in sys.path), "OMP_NUM_THREADS": "1"}
    told = subprocess.run(
        [sys.executable, "-c", CHILD, tmp_path / "run.toml"], env=os.environ | paths, stdout=subprocess.PIPE, check=True
    )
    planned, reserve, taken = json.loads(told.stdout)
    assert 0.7 * planned <= taken <= planned + reserve / 4


def test_an_update_takes_what_was_planned() -> None:
    rank = plan_stage(Setup(RUN.specs, RUN.wire, MeshLayout()), 1).rank
    assert rank.update < 2 * 2**20 < rank.peak(4)


LARGE = RUN.model_copy(
    update={
        "model": MODEL.model_copy(
            update={
                "vocab_size": 128256,
                "hidden_size": 8192,
                "intermediate_size": 28672,
                "num_layers": 80,
                "num_heads": 64,
                "num_kv_heads": 8,
                "head_dim": 128,
            }
        )
    }
)


def test_ranks_that_split_a_large_stage_hold_their_share() -> None:
    layout = MeshLayout(8, 1, devices=tuple(f"cuda:{number}" for number in range(8)))
    plan, alone = (plan_stage(Setup(LARGE.specs, LARGE.wire, each), 1) for each in (layout, GPU))
    assert together([plan]) > 2**33 and plan.ranks == 8
    assert plan.rank.state == pytest.approx(alone.rank.state / 8, rel=0.01)


GPU = MeshLayout(devices=("cuda:0",))


def test_as_many_slots_as_fit_and_not_one_more() -> None:
    setup = Setup(RUN.specs, RUN.wire, MeshLayout(), slots=0)
    room = {slots: judge(replace(setup, slots=slots), [1], None).need for slots in (1, 5, 8)}
    assert slots_that_fit(setup, [1], room[5]) == 5
    assert slots_that_fit(setup, [1], room[5] - 1) == 4
    assert slots_that_fit(setup, [1], 10 * room[8]) == RUN.training.microbatches
    assert [slots_within(replace(setup, slots=slots), [1], room[5]) for slots in (0, 3, 9)] == [5, 3, 5]
    assert slots_that_fit(setup, [0, 1], 10 * room[8]) == RUN.training.microbatches


def test_moments_of_8_bits_take_what_the_optimizer_holds() -> None:
    manifest = RUN.model_copy(update={"optimizer": Optimizer(state="8bit")})
    weights = [torch.zeros(shape) for shape in Canonical.of(manifest.of_stage(1)).shapes.values()]
    held = sum(each.num_bytes for each in StageOptimizer(weights, manifest.optimizer).moments)
    assert plan_stage(Setup(manifest.specs, manifest.wire, MeshLayout()), 1).rank.optimizer == held


def test_a_mesh_keeps_the_copies_that_ranks_are_started_from_again() -> None:
    two, size = MeshLayout(2, devices=("cpu", "cpu")), copied(Canonical.of(RUN.of_stage(1))).num_bytes
    alone, mesh = (plan_stage(Setup(RUN.specs, RUN.wire, layout), 1).host["mirrors"] for layout in (MeshLayout(), two))
    assert (alone, mesh) == (0, len(COPIES) * size) and size > 0


def test_every_process_has_its_reserve() -> None:
    """Ranks on the CPU are processes of each stage; a peer of one rank is one process, and a GPU has one reserve."""
    for layout, stages, processes in (
        (MeshLayout(), [0, 1], 1),
        (MeshLayout(2, devices=("cpu", "cpu")), [1], 2),
        (MeshLayout(2, devices=("cpu", "cpu")), [0, 1], 4),
        (MeshLayout(2, devices=("cuda:0", "cuda:1")), [0, 1], 2),
    ):
        found = judge(Setup(RUN.specs, RUN.wire, layout), stages, None)
        assert found.need - together(found.plans) == processes * RESERVE[layout.kind]


def test_gpus_share_a_stage_by_the_mesh_that_fits_and_exchanges_least() -> None:
    model = MODEL.model_copy(update={"hidden_size": 512, "intermediate_size": 1408, "num_heads": 8, "head_dim": 64})
    specs = RUN.model_copy(update={"model": model}).specs
    setup = Setup(specs, RUN.wire, MeshLayout(), slots=1)
    layouts = [MeshLayout(1, 2, shard, devices=("cuda:0", "cuda:1")) for shard in ("dp", "zero1")]
    needs = {layout.shard: judge(replace(setup, layout=layout), [1], None).need for layout in layouts}
    assert needs["dp"] > needs["zero1"]
    for shard, room in needs.items():
        found = machine_fit(setup, [1], MachineKind(gpus=2, gpu_gib=room / 2**30))
        assert (found.shard, found.slots, found.need) == (shard, 1, room)
        assert found.mesh_bytes == 0, "their GPUs exchange nothing for a microbatch"


def test_a_peer_refuses_what_does_not_fit_and_says_how_much_is_missing() -> None:
    setup = Setup(RUN.specs, RUN.wire, MeshLayout())
    least = judge(replace(setup, slots=1), [1], None).need
    slots_within(setup, [1], least)
    with pytest.raises(UsageError, match=r"stage 1 does not fit.*: 1.00 MiB are missing; what takes less: .*--slots"):
        slots_within(setup, [1], least - 2**20)
    both = judge(replace(setup, slots=1), [0, 1], None).need
    slots_within(setup, [0, 1], both)
    with pytest.raises(UsageError, match=r"one peer with stages 0,1 does not fit.*: 1 B are missing"):
        slots_within(setup, [0, 1], both - 1)


def test_a_gpu_peer_is_refused_before_it_starts_if_the_machine_has_too_little_memory() -> None:
    one = replace(Setup(RUN.specs, RUN.wire, GPU), slots=1)
    plenty, least = 1 << 50, judge(one, [1], 1 << 50).host_need
    assert slots_within(one, [1], plenty, least) == 1
    assert slots_that_fit(replace(one, slots=0), [1], plenty, plenty) == RUN.training.microbatches
    words = r"does not fit the memory outside its devices: it needs .* there, and may use .*: 1.00 MiB are missing"
    with pytest.raises(UsageError, match=words):
        slots_within(one, [1], plenty, least - 2**20)
    more = judge(replace(one, slots=3), [1], plenty).host_need
    assert slots_that_fit(replace(one, slots=0), [1], plenty, more) == 3


def test_a_start_looks_at_host_memory_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_fit, "memory_here", lambda layout: 1 << 50)
    monkeypatch.setattr(memory_fit, "available_memory", lambda: 1 << 20)
    assert Capacity(ONE_CPU, RUN).slots(PeerConfig(slots=4), [1]) == 4, "there is one memory"
    monkeypatch.setattr(memory_fit, "choose_layout", lambda *_, **__: GPU)
    for slots in (0, 4):
        with pytest.raises(UsageError, match="the memory outside its devices"):
            Capacity(PeerConfig(), RUN).slots(PeerConfig(slots=slots), [1])


def test_a_changed_limit_changes_which_stages_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    free = 1 << 50
    monkeypatch.setattr(memory_fit, "available_memory", lambda: free)
    large = RUN.model_copy(update={"model": MODEL.model_copy(update={"vocab_size": 200_000})})
    capacity = Capacity(ONE_CPU, large)
    free = 0  # now the peer has taken it
    one = replace(capacity.setup(ONE_CPU), slots=1)
    needs = [judge(one, [stage], None).need for stage in range(3)]
    assert needs[1] < min(needs[0], needs[2]), "of three stages the middle one has no matrix of the vocabulary"

    def within(num_bytes: float) -> PeerConfig:
        return PeerConfig(device="cpu", caps=Caps(host_gib=num_bytes / 2**30))

    assert list(capacity.stages(ONE_CPU)) == list(capacity.stages(within(1 << 49))) == [0, 1, 2]
    tight = within((needs[1] + min(needs[0], needs[2])) / 2)
    assert list(capacity.stages(tight)) == [1]
    assert capacity.slots(tight, [1]) == capacity.stages(tight)[1] >= 1
    with pytest.raises(UsageError, match="stage 0 does not fit"):
        capacity.slots(tight, [0])
    assert capacity.slots(within(1 << 49), [0]) == capacity.slots(ONE_CPU, [0])
