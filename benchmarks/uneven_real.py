"""The swarm of `benchmarks/uneven.py --real`: three replicas of one stage and a trainer, as processes on loopback.

Everything is real but the time that arithmetic takes: a replica holds a queue for compute like the simulator's
(`testing.virtual_device`), on the machine's clock, before it computes a tiny model. So three machines of any speeds fit
on two cores. What is left of the machine shows all the same: the figure is worth as much as the machine is idle.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from swarmnet.config.peer import Log, PeerConfig, Role
from swarmnet.local.prepare import with_data
from swarmnet.manifest.file import to_toml
from swarmnet.manifest.schema import Cut, Data, Manifest, Model, Training
from swarmnet.messages import Packed
from swarmnet.peer.run import run_peer
from swarmnet.stage.seams import Compute, Engine, Stash
from swarmnet.telemetry.events import EventReader
from swarmnet.testing.virtual_device import Device, JobKind, JobTurn
from swarmnet.trainer.run import run_trainer

Work = Callable[[PeerConfig, Manifest], int]

PATIENCE_S = 300.0
"""A swarm that takes longer has failed."""

TINY = Model(
    vocab_size=256, hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16
)


class PacedCompute:
    """A Compute whose jobs each take as long as a forward on `device`, and more if the arithmetic does."""

    def __init__(self, inner: Compute, device: Device) -> None:
        self._inner, self._device = inner, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def forward(self, step: int, index: int, payload: Sequence[Packed], *, train: bool) -> Stash:
        await self._turn(step, JobKind.FORWARD, index)
        stash = await self._inner.forward(step, index, payload, train=train)
        stash.compute_s += self._device.forward_s
        return stash

    async def backward(self, stash: Stash, gradient: Sequence[Packed]) -> tuple[Packed, ...]:
        await self._turn(stash.step, JobKind.BACKWARD, stash.index)
        stash.compute_s += self._device.forward_s
        return await self._inner.backward(stash, gradient)

    async def accumulate(self, stash: Stash) -> bool:
        await self._turn(stash.step, JobKind.WEIGHTS, stash.index)
        return await self._inner.accumulate(stash)

    async def _turn(self, step: int, kind: JobKind, index: int) -> None:
        await self._device.run(self._device.forward_s, JobTurn(step, kind, 0, index))


def serve(forward_s: float, config: PeerConfig, manifest: Manifest) -> int:
    """A peer whose forward takes so long, and a backward and a weight pass as long again each."""

    def paced(engine: Engine) -> Engine:
        return Engine(cast(Compute, PacedCompute(engine.compute, Device(forward_s))), engine.sums)

    return run_peer(config, manifest, wrap_engine=paced)


class Child:
    """A process and the events it writes."""

    def __init__(self, config: PeerConfig, manifest: Manifest, work: Work) -> None:
        assert config.events is not None
        self._reader = EventReader(config.events)
        self.events: list[dict[str, Any]] = []
        self._process = multiprocessing.get_context("spawn").Process(target=work, args=(config, manifest))
        self._process.start()

    def wait_for(self, event: str) -> dict[str, Any]:
        """The first event of that name, once there is one. Ends the benchmark if the child does."""
        until = time.monotonic() + PATIENCE_S
        while True:
            self.events += self._reader.read()
            if found := next((record for record in self.events if record["event"] == event), None):
                return found
            if not self._process.is_alive() or time.monotonic() > until:
                sys.exit(f"the swarm failed: no {event!r}")
            time.sleep(0.05)

    def stop(self) -> None:
        """Ask it to stop and wait until it has."""
        self._process.terminate()
        self._process.join(20.0)
        self._process.kill()
        self._process.join()


def real_step_seconds(
    speeds: Sequence[float], *, microbatches: int, forward_s: float, steps: int = 14, warmup: int = 4
) -> float:
    """Seconds of a step, over those after the warm-up, of a fresh swarm whose replicas have these speeds."""
    training = Training(
        total_steps=steps, microbatches=microbatches, microbatch_size=1, sequence_length=16, eval_every=0
    )
    manifest = with_data(
        Manifest(name="uneven", model=TINY, cut=Cut(stages=1), data=Data(source="corpus:small"), training=training),
        base=Path(),
    )
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        (path := Path(scratch) / "run.toml").write_text(to_toml(manifest), encoding="utf-8")

        def start(name: str, bootstrap: Sequence[str], work: Work, *, role: Role = "stage") -> Child:
            config = PeerConfig(
                manifest=path,
                roles=(role,),
                stages=(0,) if role == "stage" else (),
                dir=Path(scratch) / name,
                host="127.0.0.1",
                bootstrap=tuple(bootstrap),
                device="cpu",
                events=Path(scratch) / f"{name}.jsonl",
                log=Log(level="warning"),
            )
            child = Child(config, manifest, work)
            stack.callback(child.stop)
            return child

        first, *others = (functools.partial(serve, forward_s / speed) for speed in speeds)
        head = start("s0", (), first)
        bootstrap = head.wait_for("listening")["dht"]
        for child in [start(f"s{number}", bootstrap, work) for number, work in enumerate(others, 1)]:
            child.wait_for("listening")
        start("trainer", bootstrap, run_trainer, role="trainer")
        head.wait_for("finished")
    ends = {record["step"]: record["t"] for record in head.events if record["event"] == "applied"}
    return float((ends[steps - 1] - ends[warmup - 1]) / (steps - warmup))
