"""A stage trained for some steps, in one process or as one rank of a mesh, three microbatches in flight; for tests."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from swarmnet.ids import NO_CHAIN, Ballot, PeerId, RoundId
from swarmnet.manifest.schema import Averaging, Cut, Manifest, Model, Numerics, Optimizer, Training
from swarmnet.messages import Commit
from swarmnet.model.comm import Comm
from swarmnet.ranks.device_backend import DeviceBackend
from swarmnet.ranks.layout import MeshLayout, MeshSplit, Shard
from swarmnet.ranks.stage import RankStage
from swarmnet.stage.accumulator import sum_dtype
from swarmnet.stage.canonical import Canonical
from swarmnet.stage.passes import ForwardPass, MemoryPolicy
from swarmnet.stage.rounding import FineRounding, NoRounding, Rounding
from tests.contracts.thread_comm import ThreadComm, run_mesh

T = TypeVar("T")

ROWS, LENGTH, MICROBATCHES, STEPS = 4, 8, 3, 5
BACKWARDS, ADDITIONS = (1, 2, 0), (2, 0, 1)
ROUND = RoundId(Ballot(0, PeerId("peer")), 0)
CPU = torch.device("cpu")
MODEL = Model(  # 35 rows divide by no axis, 9 channels leave the last of 4 ranks nothing, 2 key heads are less than 4
    vocab_size=35,
    hidden_size=9,
    intermediate_size=12,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    init_std=0.3,
    qk_norm=True,
)


def run_of(
    mode: str = "deterministic",
    *,
    stages: int = 1,
    model: Model = MODEL,
    sync: str = "exact",
    compute: str = "fp32",
    **optimizer: object,
) -> Manifest:
    """A run whose gradients are clipped. eps is large: under Adam a gradient of nothing but rounding moves a weight as
    far as any other, and rounding is what meshes differ by."""
    # Accumulators of floats are those of local sync.
    mode, sync = ("fp32", "local") if mode == "fp32" or sync == "local" else (mode, sync)
    codec = "fp32" if sync == "local" else "small" if mode == "small" else "int64"
    return Manifest(
        model=model,
        cut=Cut(stages=stages, layers=(1, 1, 0) if stages == 3 else "auto"),
        training=Training(seed=4, microbatches=MICROBATCHES, microbatch_size=ROWS, sequence_length=LENGTH),
        optimizer=Optimizer(**{"learning_rate": 3e-3, "warmup_steps": 2, "clip_norm": 0.2, "eps": 1e-3} | optimizer),
        numerics=Numerics(mode="deterministic" if mode == "small" else mode, compute=compute),
        averaging=Averaging(sync=sync, codec=codec, **{"overlap_after": 2} if sync == "overlap" else {}),
    )


def layout_of(tensor: int = 1, data: int = 1, shard: Shard = "none", *, sequence_parallel: bool = False) -> MeshLayout:
    """On the CPU."""
    devices = ("cpu",) * (tensor * data)
    return MeshLayout(tensor=tensor, data=data, shard=shard, sequence_parallel=sequence_parallel, devices=devices)


@dataclass(slots=True)
class Trained:
    """What came of it. Of a rank: outputs and input gradients of its rows, the rest of the whole stage."""

    losses: list[float] = field(default_factory=list)  # of each step, if last
    outputs: list[Tensor] = field(default_factory=list)  # of each microbatch, if not last
    input_gradients: list[Tensor] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)  # of each step's average gradient, before clipping
    total: Tensor = field(default_factory=lambda: torch.zeros(0))
    state: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Batch:
    """One microbatch."""

    tokens: Tensor
    hidden: Tensor | None
    gradient: Tensor | None


def batches(manifest: Manifest, stage: int, step: int) -> Iterator[Batch]:
    """The microbatches of a step, and what comes back to a stage that is not the last."""
    generator = torch.Generator().manual_seed(step)
    shape = (ROWS, LENGTH, manifest.model.hidden_size)
    for _ in range(MICROBATCHES):
        tokens = torch.randint(0, manifest.model.vocab_size, (ROWS, LENGTH + 1), generator=generator, dtype=torch.int32)
        hidden, gradient = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
        last = stage == manifest.cut.stages - 1
        yield Batch(tokens, hidden if stage else None, None if last else gradient)


def rounding_of(canonical: Canonical) -> Rounding:
    """Of every step, with int64 accumulators as with fp32."""
    numerics = canonical.spec.numerics
    return FineRounding(numerics.grid_bits, 1) if numerics.integers else NoRounding()


def commits_of(canonical: Canonical, step: int, total: Tensor, square: float | None = None) -> list[Commit]:
    """As if the other stages had nothing to add. square: of what the total stands for, if that is no fixed grid's."""
    squares = [0.0] * canonical.spec.cut.stages
    squares[canonical.stage] = canonical.square_norm(total, rounding_of(canonical)) if square is None else square
    tokens = MICROBATCHES * ROWS * LENGTH
    return [Commit(stage, step, NO_CHAIN, ROUND, b"", tokens, 0.0, square) for stage, square in enumerate(squares)]


@functools.cache
def train_alone(
    manifest: Manifest, stage: int = 0, *, start: int = 0, steps: int = STEPS, memory: MemoryPolicy | None = None
) -> Trained:
    """In one process, from version `start`, which is this process's too."""
    body = DeviceBackend(manifest.of_stage(stage), device=CPU, memory=memory)
    body.state.reset_to_seed()
    if start:
        body.state.take_over(train_alone(manifest, stage, steps=start).state, version=start)
    seen = Trained()
    for step in range(start, start + steps):
        given, works, losses = list(batches(manifest, stage, step)), [], []
        for batch in given:
            hidden = None if batch.hidden is None else batch.hidden.clone()
            output, work = body.forward(step, batch.tokens, hidden, train=True)
            works.append(work)
            (losses if body.state.canonical.spec.last else seen.outputs).append(output.detach())
        for m in BACKWARDS:
            own = body.backward(works[m], given[m].gradient)
            if own is not None:
                seen.input_gradients.append(own)
        for m in ADDITIONS:
            assert body.accumulate(works[m], step=step, index=m, discards=0)
        seen.losses.append(sum(loss.item() for loss in losses))
        seen.total = body.sums[step % len(body.sums)].read(step).clone()
        canonical = body.state.canonical
        commits = commits_of(canonical, step, seen.total, body.state.square_norm(seen.total))
        seen.norms.append(commits[stage].grad_sq_norm ** 0.5 / commits[stage].num_tokens)
        body.state.apply(seen.total, commits)
        if body.state.outer is not None:
            torch._foreach_mul_([weight.detach() for weight in body.state.newest], 0.9)  # as an outer step does
            body.state.outer.steps += 1
    memory = body.state.canonical.layout.memory()
    version = body.state.copy(memory)
    seen.state = body.state.canonical.unpack(body.state.canonical.layout.seal(memory, version=version), version=version)
    return seen


def held_bytes(stage: RankStage) -> dict[str, int]:
    """Memory of what a rank holds between orders; of parameters that are gathered, all."""
    parameters = [parameter for module in stage._modules for parameter in module.parameters()]
    return {
        "parameters": sum((p.to_local() if isinstance(p, DTensor) else p).nbytes for p in parameters),
        "accumulators": sum(total._sum.nbytes for total in stage.sums),
        "moments": sum(moments.num_bytes for moments in stage._optimizer.moments),
    }


class Rank:
    """One rank of a mesh and what its peer process would do: rows in and out, sums combined, whole states."""

    def __init__(
        self,
        manifest: Manifest,
        stage: int,
        layout: MeshLayout,
        *,
        data: Comm,
        tensor: Comm,
        memory: MemoryPolicy | None = None,
        device: torch.device = CPU,
    ) -> None:
        self.manifest, self.number, self.comms = manifest, stage, (tensor, data)
        self.rank = layout.rank(data.rank, tensor.rank)
        self.rows = MeshSplit(manifest.of_stage(0), layout).rows(self.rank)
        self.stage = RankStage(manifest.of_stage(stage), layout, tensor=tensor, data=data, device=device, memory=memory)
        self.device = device
        self.canonical = Canonical.of(manifest.of_stage(stage))
        self.works: dict[int, ForwardPass] = {}

    def forward(self, key: int, step: int, tokens: Tensor, hidden: Tensor | None, *, train: bool = True) -> Tensor:
        """As its peer process orders it; the microbatch is called `key` until it is added."""
        kept = None if hidden is None else hidden.to(self.device, copy=True)
        output, work = self.stage.forward(step, tokens.to(self.device, copy=True), kept, train=train)
        if work is not None:
            self.works[key] = work
        return output

    def backward(self, key: int, gradient: Tensor | None) -> Tensor | None:
        """The gradient of its input."""
        return self.stage.backward(self.works[key], None if gradient is None else gradient.to(self.device, copy=True))

    def accumulate(self, key: int, *, step: int, index: int, discards: int = 0) -> bool:
        """Add its gradients."""
        self.stage.sums[step % len(self.stage.sums)].follow(discards)
        return self.stage.accumulate(self.works.pop(key), step=step, index=index, discards=discards)

    def train(self, *, start: int = 0, steps: int = STEPS, rounding: Rounding | None = None) -> Trained:
        """From version `start` on, which the stage has. rounding: of sums that are on no fixed grid."""
        seen, stage = Trained(), self.stage
        rows = slice(self.rows.start, self.rows.stop)
        last = self.number == self.manifest.cut.stages - 1
        for step in range(start, start + steps):
            given, losses = list(batches(self.manifest, self.number, step)), []
            for m, batch in enumerate(given):
                hidden = None if batch.hidden is None else batch.hidden[rows]
                output = self.forward(m, step, batch.tokens[rows], hidden)
                (losses if last else seen.outputs).append(output)
            for m in BACKWARDS:
                own = self.backward(m, None if last else given[m].gradient[rows])
                if own is not None:
                    seen.input_gradients.append(own)
            for m in ADDITIONS:
                assert self.accumulate(m, step=step, index=m)
            seen.losses.append(sum(self.comms[1].all_reduce(loss).item() for loss in losses))
            seen.total = self.sum_of(step)
            square = None if rounding is None else self.canonical.square_norm(seen.total, rounding)
            commits = commits_of(self.canonical, step, seen.total, square)
            seen.norms.append(commits[self.number].grad_sq_norm ** 0.5 / commits[self.number].num_tokens)
            update = self.canonical.update(step, commits)
            stage.update(step, seen.total, scale=update.scale, rate=update.rate)
        seen.state = self.state_of(start + steps)
        return seen

    def one_update(self, version: int, total: Tensor) -> dict[str, Tensor]:
        """The state that a given sum leads to."""
        update = self.canonical.update(version, commits_of(self.canonical, version, total))
        self.stage.update(version, total, scale=update.scale, rate=update.rate)
        return self.state_of(version + 1)

    def writers_of(self, step: int) -> Tensor:
        """By how many ranks each element of a sum, and then of a state, is written."""
        nothing = torch.iinfo(torch.int64).min if self.manifest.numerics.mode == "deterministic" else torch.nan
        total = torch.full((self.canonical.num_elements,), nothing, dtype=sum_dtype(self.manifest.numerics))
        self.stage.sums[step % len(self.stage.sums)].follow(0)
        self.stage.write_sum(step, total)
        state = {name: torch.full(shape, torch.nan) for name, shape in self.canonical.state_shapes.items()}
        self.stage.write_state(step, state)
        values = torch.cat([tensor.flatten() for tensor in state.values()])
        return self._together(torch.cat([(total != nothing) & (total == total), values == values]).float())

    def held_in_flight(self) -> dict[str, int]:
        """What this rank holds while a microbatch waits for its backward, which never comes."""
        batch = next(batches(self.manifest, self.number, 0))
        rows = slice(self.rows.start, self.rows.stop)
        hidden = None if batch.hidden is None else batch.hidden[rows]
        self.forward(99, 0, batch.tokens[rows], hidden)
        held = held_bytes(self.stage)
        self.works.clear()
        return held

    def sum_of(self, step: int, *, discards: int = 0) -> Tensor:
        """The sum of a step, whole: what the ranks write, each its own."""
        total = torch.zeros(self.canonical.num_elements, dtype=sum_dtype(self.manifest.numerics))
        self.stage.sums[step % len(self.stage.sums)].follow(discards)
        self.stage.write_sum(step, total)
        return self._together(total)

    def state_of(self, version: int) -> dict[str, Tensor]:
        """The state, whole."""
        tensors = {name: torch.zeros(shape) for name, shape in self.canonical.state_shapes.items()}
        self.stage.write_state(version, tensors)
        return {name: self._together(tensor) for name, tensor in tensors.items()}

    def _together(self, written: Tensor) -> Tensor:
        """What all ranks have written; zero where one has not."""
        for comm in self.comms:
            written = comm.all_reduce(written.to(self.device)).cpu()
        return written


@dataclass(frozen=True, slots=True)
class Case:
    """A mesh, and what to train on it."""

    tensor: int
    shard: Shard
    mode: str = "deterministic"
    sequence_parallel: bool = False
    stage: int = 0
    stages: int = 1
    tied: bool = False
    sync: str = "exact"
    compute: str = "fp32"
    memory: MemoryPolicy | None = None
    start: int = 0
    steps: int = 2

    def manifest(self) -> Manifest:
        """The run."""
        model = MODEL.model_copy(update={"tie_embeddings": self.tied})
        return run_of(self.mode, stages=self.stages, model=model, sync=self.sync, compute=self.compute)

    @property
    def tolerance(self) -> float:
        """Of relative distances."""
        return 1e-5 if self.compute == "fp32" else 5e-2


CASES = {  # of four ranks
    "zero3": Case(1, "zero3"),
    "zero3-tensor-recompute": Case(2, "zero3", sequence_parallel=True, memory=MemoryPolicy("recompute")),
    "zero3-middle-recompute_layers": Case(2, "zero3", stage=1, stages=3, memory=MemoryPolicy("recompute_layers")),
    "zero3-head": Case(1, "zero3", stage=2, stages=3, memory=MemoryPolicy(offload_optimizer=True)),
    "zero3-tied-selective": Case(2, "zero3", tied=True, start=1, memory=MemoryPolicy("selective")),
    "zero3-overlap": Case(2, "zero3", sync="overlap", steps=4),
    "zero3-bf16": Case(2, "zero3", compute="bf16", steps=1),
    "zero2-tensor": Case(2, "zero2"),
}


def far(found: Trained, expected: Trained, before: dict[str, Tensor], rows: range = range(ROWS)) -> dict[str, float]:
    """Relative distances, of updates and not of weights. before: the state that both began with. rows: of `found`."""

    def cut(tensors: list[Tensor]) -> list[Tensor]:
        return [tensor[rows.start : rows.stop] for tensor in tensors]

    pairs = {
        "losses": ([torch.tensor(found.losses).double()], [torch.tensor(expected.losses).double()]),
        "norms": ([torch.tensor(found.norms)], [torch.tensor(expected.norms)]),
        "sum": ([found.total.double()], [expected.total.double()]),
        "outputs": (found.outputs, cut(expected.outputs)),
        "input gradients": (found.input_gradients, cut(expected.input_gradients)),
    }
    differences = {what: _apart(ours, theirs) for what, (ours, theirs) in pairs.items() if theirs}
    return differences | changes(found.state, expected.state, before)


def changes(found: dict[str, Tensor], expected: dict[str, Tensor], before: dict[str, Tensor]) -> dict[str, float]:
    """Relative distances of what has become of a state: of weights, and of each moment."""
    differences = {}
    for kind in ("exp_avg.", "exp_avg_sq.", "previous.", ""):
        if names := [name for name in before if _kind(name) == kind]:
            ours, theirs = ([each[name] - before[name] for name in names] for each in (found, expected))
            differences[f"change of {kind or 'weights'}"] = _apart(ours, theirs)
    return differences


def _kind(name: str) -> str:
    return next((kind for kind in ("exp_avg.", "exp_avg_sq.", "previous.") if kind in name), "")


def _apart(found: list[Tensor], expected: list[Tensor]) -> float:
    ours, theirs = (torch.cat([tensor.flatten() for tensor in tensors]) for tensors in (found, expected))
    assert ours.shape == theirs.shape
    length = theirs.norm().item()
    return (ours - theirs).norm().item() / (length or 1.0)


def on_ranks(
    manifest: Manifest, layout: MeshLayout, body: Callable[[Rank], T], *, stage: int = 0, start: int = 0, **options: Any
) -> list[T]:
    """`body` on every rank, threads of this process, with the state that one process has at version `start`."""
    begin = train_alone(manifest, stage, steps=start).state

    def own(data: ThreadComm, tensor: ThreadComm) -> T:
        rank = Rank(manifest, stage, layout, data=data, tensor=tensor, **options)
        rank.stage.read_state(start, begin)
        return body(rank)

    return run_mesh(layout.data, layout.tensor, own)


def check(
    found: Trained, manifest: Manifest, *, stage: int = 0, start: int = 0, steps: int = STEPS, rows: range = range(ROWS)
) -> None:
    expected = train_alone(manifest, stage, start=start, steps=steps)
    differences = far(found, expected, train_alone(manifest, stage, steps=start).state, rows)
    assert max(differences.values()) <= 1e-5, differences
