"""Tokens per second of a two-stage swarm beside torch's own pipeline and a single process, all in one run.

    python benchmarks/pipeline.py [--json FILE] [--turns N] [--steps N] [--costs] [--quick]

The same decoder, cut, microbatches, clipping and AdamW in every way:

    swarm           two peers and a trainer as real processes: DHT, gRPC over TLS on loopback; codec small, fp32 wire
    swarm exact     the same in deterministic mode: sums of small integers, the default
    1f1b            torch.distributed.pipelining, Schedule1F1B, two gloo ranks
    single          one process with two threads

Swarm and 1f1b have one compute thread per stage, so everybody gets two cores. A turn starts fresh processes, lets
`--warmup` steps pass and times the `--steps` after them, from the end of one optimizer step to the end of another.
Turns are interleaved, and a ratio is the median over turns of what two ways did in the same turn, so that a noisy
moment hits both. `vs_1f1b` and `vs_single` are of `swarm`, which does the arithmetic the other two do.

The last turn runs the swarm with int8 on the wire and counts what crosses the boundary per microbatch, headers
included: activation and tokens down, gradient up. The least an exchange of one byte an element can do is 2E.

Before the turns one more of `swarm exact`, with clocks in its peers (`stage_cost.py`), says what a microbatch is made
of, beside a plain loop of forward and backward: the same two modules, in two processes at once. `--costs` stops there.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import stage_cost
import torch
import torch.distributed as dist
from harness import Benchmark, write
from stage_cost import Costs, Plain
from torch import Tensor, nn

from swarmnet.data.sampler import Sampler
from swarmnet.data.source import read_tokens
from swarmnet.local.prepare import with_data
from swarmnet.manifest.file import load, to_toml
from swarmnet.manifest.schema import Averaging, Cut, Data, Manifest, Model, Numerics, Optimizer, Training, Wire
from swarmnet.model.cut import cut_layers
from swarmnet.model.decoder import StageModule, loss_sum
from swarmnet.net.grpc_options import tune_allocator
from swarmnet.telemetry.events import EventReader

PATIENCE_S = 300.0
"""A turn that takes longer has failed."""

LARGE = Model(
    vocab_size=256, hidden_size=512, intermediate_size=1408, num_layers=8, num_heads=8, num_kv_heads=4, head_dim=64
)
SMALL = Model(
    vocab_size=256, hidden_size=64, intermediate_size=176, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=32
)


@dataclass(frozen=True, slots=True)
class Plan:
    """How much of everything. slots: microbatches a peer holds at once."""

    model: Model
    microbatches: int
    microbatch_size: int
    sequence_length: int
    warmup: int
    steps: int
    turns: int
    slots: int

    @property
    def tokens(self) -> int:
        """Per step."""
        return self.microbatches * self.microbatch_size * self.sequence_length

    def manifest(self, *, exact: bool = False, codec: str = "fp32") -> Manifest:
        """The run, long enough for one turn."""
        return with_data(
            Manifest(
                name="benchmark",
                model=self.model,
                cut=Cut(stages=2),
                data=Data(source="corpus:small"),
                training=Training(
                    total_steps=self.warmup + self.steps,
                    microbatches=self.microbatches,
                    microbatch_size=self.microbatch_size,
                    sequence_length=self.sequence_length,
                    eval_every=0,
                ),
                optimizer=Optimizer(learning_rate=3e-4, schedule="constant", warmup_steps=0),
                numerics=Numerics(mode="deterministic" if exact else "fast"),
                averaging=Averaging(codec="small"),
                wire=Wire(activations=codec, gradients=codec),  # type: ignore[arg-type]
            ),
            base=Path(),
        )


# ---------------------------------------------------------------- the swarm


@dataclass(frozen=True, slots=True)
class SwarmTurn:
    """What one swarm did: seconds per step, bytes over the boundary per microbatch, loss of the last step. With clocks:
    what a microbatch cost each stage, and what a step took of the trainer's CPU."""

    step_s: float
    boundary_bytes: float
    loss: float
    costs: tuple[Costs, ...] = ()
    trainer_s: float = 0.0


class Child:
    """One `swarmnet peer|trainer` on loopback and the events it writes."""

    def __init__(self, role: list[str], directory: Path, bootstrap: list[str], *, program: list[str]) -> None:
        directory.mkdir()
        self._log, events = directory / "log.txt", directory / "events.jsonl"
        self._reader = EventReader(events)
        self.events: list[dict[str, Any]] = []
        argv = [
            sys.executable,
            *program,
            *role,
            "--manifest",
            str(directory.parent / "run.toml"),
            "--dir",
            str(directory),
            "--events",
            str(events),
            "--log-level",
            "warning",
            "--host",
            "127.0.0.1",
            "--port",
            "0",
            "--dht-port",
            "0",
            *(part for address in bootstrap for part in ("--bootstrap", address)),
        ]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def last(self, event: str) -> dict[str, Any] | None:
        """The newest event of that name."""
        self.events += self._reader.read()
        return next((record for record in reversed(self.events) if record["event"] == event), None)

    def wait_for(self, event: str) -> dict[str, Any]:
        """The newest event of that name, once there is one. Ends the benchmark if the child does."""
        deadline = time.monotonic() + PATIENCE_S
        while (found := self.last(event)) is None:
            if self._process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"the swarm failed: no {event!r}\n{self._log.read_text(encoding='utf-8')[-2000:]}")
            time.sleep(0.1)
        return found

    def cpu_s(self) -> float:
        """User and system time since it began."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        """Ask it to stop and wait until it has."""
        self._process.terminate()
        try:
            self._process.wait(20.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def run_swarm(
    plan: Plan, manifest: Manifest, directory: Path, *, plain: Callable[[], list[Plain]] | None = None
) -> SwarmTurn:
    """Start two peers and a trainer, let them train to the end, and read their events. plain: measures each
    stage's plain loop; with it peers have clocks."""
    (directory / "run.toml").write_text(to_toml(manifest), encoding="utf-8")
    with contextlib.ExitStack() as stack:

        def start(name: str, role: list[str], bootstrap: list[str]) -> Child:
            record = str(directory / f"{name}.jsonl")
            program = [stage_cost.__file__, record] if plain and role[0] == "peer" else ["-m", "swarmnet"]
            child = Child(role, directory / name, bootstrap, program=program)
            stack.callback(child.stop)
            return child

        slots = ["--slots", str(plan.slots), "--no-restart"]
        first = start("first", ["peer", "--stage", "0", *slots], [])
        bootstrap = first.wait_for("listening")["dht"]
        second = start("second", ["peer", "--stage", "1", *slots], bootstrap)
        trainer = start("trainer", ["trainer"], bootstrap)
        while plain and first.wait_for("applied")["step"] < plan.warmup - 1:
            time.sleep(0.02)
        trainer_s = trainer.cpu_s()
        first.wait_for("finished")
        trainer_s = trainer.cpu_s() - trainer_s
        second.wait_for("finished")
    traffic, beyond = first.wait_for("traffic")["calls"], second.wait_for("listening")["peer"]
    crossed = sum(
        row["sent"] + row["received"] for row in traffic if row["peer"] == beyond and row["request"] == "Process"
    )
    ends: dict[int, float] = {}  # of a step: when the last stage has applied it
    for record in first.events + second.events:
        if record["event"] == "applied":
            ends[record["step"]] = max(record["t"], ends.get(record["step"], 0.0))
    spent = [
        stage_cost.costs(
            *stage_cost.read(directory / f"{name}.jsonl", first=plan.warmup - 1, last=plan.warmup + plan.steps - 1),
            loop,
            microbatches=plan.steps * plan.microbatches,
        )
        for name, loop in zip(("first", "second"), plain() if plain else (), strict=False)
    ]
    commit = second.wait_for("committed")
    return SwarmTurn(
        (ends[plan.warmup + plan.steps - 1] - ends[plan.warmup - 1]) / plan.steps,
        crossed / (len(ends) * plan.microbatches),
        commit["loss_sum"] / commit["num_tokens"],
        tuple(spent),
        trainer_s / plan.steps,
    )


# ---------------------------------------------------------------- the others


class Batches:
    """The run's tokens, a whole step at a time: inputs and labels [M B, T]."""

    def __init__(self, manifest: Manifest) -> None:
        self._training, self._tokens = manifest.training, read_tokens(manifest.data)
        training = self._training
        self._sampler = Sampler(
            training.seed, self._tokens.num_tokens, training.sequence_length, training.microbatch_size
        )

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        """The microbatches of `step`, one after the other."""
        first, length = step * self._training.microbatches, self._training.sequence_length
        batch = torch.cat(
            [
                self._tokens.microbatch(self._sampler.positions(first + index), length)
                for index in range(self._training.microbatches)
            ]
        )
        return batch[:, :-1], batch[:, 1:]


def make_update(manifest: Manifest, module: nn.Module, *, ranks: int) -> Callable[[int], None]:
    """Average over tokens, clip by the norm over all ranks, one fused AdamW step: what a peer does after a round."""
    table = manifest.optimizer
    parameters = list(module.parameters())
    adamw = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": table.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=table.learning_rate,
        betas=(table.beta1, table.beta2),
        eps=table.eps,
        fused=True,
    )

    def update(num_tokens: int) -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        square = torch.stack(torch._foreach_norm(gradients)).square().sum()
        if ranks > 1:
            dist.all_reduce(square)
        norm = square.sqrt().item() / num_tokens
        torch._foreach_mul_(gradients, min(1.0, table.clip_norm / (norm + 1e-6)) / num_tokens)
        adamw.step()
        adamw.zero_grad(set_to_none=False)

    return update


Step = Callable[[int], float]
"""Train one step, by number; returns its mean loss."""


def run_single(pipe: Connection, path: Path, plan: Plan) -> None:
    """Send (seconds per step, last loss) of one process with two threads."""
    tune_allocator()
    torch.set_num_threads(2)
    manifest = load(path)
    module = StageModule(manifest.model, range(manifest.model.num_layers), first=True, last=True)
    module.reset(seed=manifest.training.seed)
    update, batches, size = make_update(manifest, module, ranks=1), Batches(manifest), plan.microbatch_size

    def step(number: int) -> float:
        inputs, labels = batches(number)
        total = 0.0
        for x, y in zip(torch.split(inputs, size), torch.split(labels, size), strict=True):
            loss = loss_sum(module(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        update(labels.numel())
        return total / labels.numel()

    pipe.send(_timed(step, plan))


def run_plain(pipe: Connection, path: Path, plan: Plan, stage: int) -> None:
    """Run forward and backward of a stage's microbatches each time that it is told to, and send the seconds of each:
    (on the wall, of CPU)."""
    tune_allocator()
    torch.set_num_threads(1)
    manifest = load(path)
    layers = cut_layers(manifest.model, manifest.cut, plan.sequence_length)[stage]
    module = StageModule(manifest.model, layers, first=stage == 0, last=stage == 1)
    module.reset(seed=manifest.training.seed)
    inputs, labels = (each[: plan.microbatch_size] for each in Batches(manifest)(0))
    hidden = torch.randn(*inputs.shape, manifest.model.hidden_size)

    def microbatch() -> None:
        if stage == 0:
            module(inputs).backward(hidden)
        else:
            loss_sum(module(hidden.requires_grad_()), labels).backward()  # type: ignore[no-untyped-call]

    for _ in range(plan.warmup):
        microbatch()
    pipe.send("ready")
    while pipe.recv():
        took = []
        for _ in range(2 * plan.microbatches):
            began, cpu_began = time.perf_counter(), time.thread_time()
            microbatch()
            took.append((time.perf_counter() - began, time.thread_time() - cpu_began))
        pipe.send(took)


@contextlib.contextmanager
def plain_loops(plan: Plan, manifest: Manifest, directory: Path) -> Iterator[Callable[[], list[Plain]]]:
    """Forward and backward of each stage in a process of its own, both at once as in a pipeline, each time that it is
    called: the median of a microbatch over all calls."""
    path = directory / "run.toml"
    path.write_text(to_toml(manifest), encoding="utf-8")
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(2)]
    jobs = [context.Process(target=run_plain, args=(pipes[stage][1], path, plan, stage)) for stage in range(2)]
    for job in jobs:
        job.start()
    took: list[list[tuple[float, float]]] = [[], []]
    for here, there in pipes:
        there.close()
        here.recv()

    def turn() -> list[Plain]:
        for here, _ in pipes:
            here.send(True)
        for (here, _), found in zip(pipes, took, strict=True):
            found += here.recv()
        return [Plain(*(statistics.median(each) for each in zip(*found, strict=True))) for found in took]

    try:
        yield turn
    finally:
        for (here, _), job in zip(pipes, jobs, strict=True):
            here.send(False)
            job.join()


def run_rank(pipe: Connection, path: Path, plan: Plan, rank: int, store: str) -> None:
    """One rank of two under Schedule1F1B; the last one sends (seconds per step, last loss)."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B  # takes long to import: not for --help

    tune_allocator()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    manifest = load(path)
    ranges = cut_layers(manifest.model, manifest.cut, manifest.training.sequence_length)
    module = StageModule(manifest.model, ranges[rank], first=rank == 0, last=rank == 1)
    module.reset(seed=manifest.training.seed)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, plan.microbatches, loss_fn=loss_sum, scale_grads=False)
    update, batches = make_update(manifest, module, ranks=2), Batches(manifest)

    def step(number: int) -> float:
        inputs, labels = batches(number)
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=labels, losses=losses)
        update(labels.numel())
        return sum(loss.item() for loss in losses) / labels.numel()

    result = _timed(step, plan)
    if rank == 1:
        pipe.send(result)
        with contextlib.suppress(EOFError):
            pipe.recv()  # until the parent has it and closes its end
    os._exit(0)  # gloo's destructors may abort a finished process


def _timed(step: Step, plan: Plan) -> tuple[float, float]:
    loss = 0.0
    for number in range(plan.warmup + plan.steps):
        if number == plan.warmup:
            began = time.perf_counter()
        loss = step(number)
    return (time.perf_counter() - began) / plan.steps, loss


def run_beside(plan: Plan, manifest: Manifest, directory: Path, way: str) -> tuple[float, float]:
    """(seconds per step, last loss) of "1f1b" or "single" in processes of their own."""
    path = directory / "run.toml"
    path.write_text(to_toml(manifest), encoding="utf-8")
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    if way == "single":
        jobs = [context.Process(target=run_single, args=(there, path, plan))]
    else:
        store = str(directory / "store")
        jobs = [context.Process(target=run_rank, args=(there, path, plan, rank, store)) for rank in range(2)]
    for job in jobs:
        job.start()
    there.close()
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not here.poll(0.1):
            if time.monotonic() > deadline:
                sys.exit(f"{way} hangs")
        result: tuple[float, float] = here.recv()
    except EOFError:
        sys.exit(f"{way} failed")
    finally:
        here.close()
        for job in jobs:
            job.join(10.0)
            job.kill()
    return result


# ---------------------------------------------------------------- turns


WAYS = ("swarm", "swarm exact", "1f1b", "single")


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """What children inherit, in every way alike: one thread (`single` asks for its two itself), and the large pages
    that peers ask for."""
    before = dict(os.environ)
    os.environ.update(OMP_NUM_THREADS="1", THP_MEM_ALLOC_ENABLE="1")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def measure(plan: Plan) -> tuple[dict[str, list[float]], dict[str, float], float]:
    """Seconds per step by way and turn, last loss by way, and boundary bytes over 2E with int8."""
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    losses: dict[str, float] = {}
    for turn in range(plan.turns):
        for way in WAYS[turn % len(WAYS) :] + WAYS[: turn % len(WAYS)]:  # nobody always goes first
            manifest = plan.manifest(exact=way == "swarm exact")
            with tempfile.TemporaryDirectory() as name:
                if way.startswith("swarm"):
                    swarm = run_swarm(plan, manifest, Path(name))
                    step_s, losses[way] = swarm.step_s, swarm.loss
                else:
                    step_s, losses[way] = run_beside(plan, manifest, Path(name), way)
            seconds[way].append(step_s)
            load = os.getloadavg()[0]
            print(f"  turn {turn + 1}  {way:12} {plan.tokens / step_s:9.0f} tokens/s   load {load:.1f}", flush=True)
    elements = plan.microbatch_size * plan.sequence_length * plan.model.hidden_size
    with tempfile.TemporaryDirectory() as name:
        crossed = run_swarm(plan, plan.manifest(codec="int8"), Path(name)).boundary_bytes
    return seconds, losses, crossed / (2 * elements)


def measure_costs(plan: Plan) -> tuple[dict[str, dict[str, dict[str, float]]], float]:
    """Milliseconds of a microbatch by stage and by what they went into, and the trainer's CPU, of one turn of the swarm
    in deterministic mode."""
    manifest = plan.manifest(exact=True)
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory() as other:
        with plain_loops(plan, manifest, Path(other)) as plain:
            plain()  # before the swarm, and once more after it
            turn = run_swarm(plan, manifest, Path(name), plain=plain)
    stages = {f"stage {stage}": asdict(spent) for stage, spent in enumerate(turn.costs)}
    return stages, 1000 * turn.trainer_s / plan.microbatches


def print_costs(stages: dict[str, dict[str, dict[str, float]]], trainer_ms: float) -> None:
    """Both stages side by side, and their shares of a step."""
    whole = [sum(spent["wall"].values()) for spent in stages.values()]
    titles = {"wall": "a microbatch of the swarm exact, ms", "beside": "CPU beside it, ms"}
    for part, title in (titles | {"overhead": "of both: Python overhead, ms"}).items():
        print(f"\n{title:44}" + "".join(f"{stage:>18}" for stage in stages))
        kinds = dict.fromkeys(kind for spent in stages.values() for kind in spent[part])
        for kind in kinds:
            found = [spent[part].get(kind, 0.0) for spent in stages.values()]
            shares = "".join(f"{ms:10.1f} {ms / of:6.1%}" for ms, of in zip(found, whole, strict=True))
            print(f"  {kind:42}{shares}")
        if part == "beside":
            print(f"  {'trainer':42}{trainer_ms:10.1f} {trainer_ms / whole[0]:6.1%}")


def main() -> None:
    """Measure, print the table, write the figures."""
    parser = Benchmark(__doc__, quick="a tiny model, one short turn: that it runs, not how fast")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="timed steps of a turn")
    parser.add_argument("--warmup", type=int, default=3, help="steps of a turn before the timed ones")
    parser.add_argument("--microbatches", type=int, default=8, help="of one step")
    parser.add_argument("--slots", type=int, default=4, help="microbatches a peer of the swarm holds at once")
    parser.add_argument("--costs", action="store_true", help="only what a microbatch is made of")
    asked = parser.asked()
    if asked.quick:
        plan = Plan(SMALL, microbatches=4, microbatch_size=2, sequence_length=32, warmup=1, steps=2, turns=1, slots=4)
    else:
        plan = Plan(
            LARGE,
            asked.microbatches,
            microbatch_size=2,
            sequence_length=128,
            warmup=asked.warmup,
            steps=asked.steps,
            turns=asked.turns,
            slots=asked.slots,
        )
    with _environment():
        stages, trainer_ms = measure_costs(plan)
        print_costs(stages, trainer_ms)
        if not asked.costs:
            seconds, losses, bytes_vs_2e = measure(plan)
    spent = {"microbatch_ms": stages, "trainer_ms": trainer_ms}
    if asked.costs:
        write(asked.json, spent)
        return

    def ratio(way: str, beside: str) -> float:
        return statistics.median(b / a for a, b in zip(seconds[way], seconds[beside], strict=True))

    print(f"\n{'':12} {'s/step':>8} {'tokens/s':>10} {'vs 1f1b':>8} {'vs single':>10} {'last loss':>11}")
    for way in WAYS:
        middle = statistics.median(seconds[way])
        print(
            f"{way:12} {middle:8.3f} {plan.tokens / middle:10.0f} {ratio(way, '1f1b'):8.2f}"
            f" {ratio(way, 'single'):10.2f} {losses[way]:11.6f}"
        )
    print(f"\nbytes over the boundary per microbatch, int8: {bytes_vs_2e:.3f} of 2E")
    figures = {
        "vs_1f1b": ratio("swarm", "1f1b"),
        "vs_single": ratio("swarm", "single"),
        "bytes_vs_2e": bytes_vs_2e,
        "exact_vs_1f1b": ratio("swarm exact", "1f1b"),
        "exact_vs_single": ratio("swarm exact", "single"),
        "seconds_per_step": seconds,
        "tokens_per_step": plan.tokens,
        "last_loss": losses,
        **spent,
    }
    write(asked.json, figures)


if __name__ == "__main__":
    main()
