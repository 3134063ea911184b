"""A snapshot costs the compute thread one copy: nothing is packed, hashed, checked or written there, nothing waits."""

from __future__ import annotations

import asyncio
import functools
import random
import sys
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from safetensors.torch import load
from stage_chain import StageChain, compute_thread, tiny, weights_of

from swarmnet.ids import Chain, RunId
from swarmnet.messages import StateHeader
from swarmnet.peer.engines import torch_engine
from swarmnet.ranks.device_backend import DeviceBackend
from swarmnet.state.checkpoints import Checkpointer, CheckpointSchedule
from swarmnet.state.disk import CheckpointStore, DirectoryDisk

RUN = RunId("a1" * 32)


def in_a_loop(story: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test."""

    @functools.wraps(story)
    def test(**fixtures: object) -> None:
        asyncio.run(story(**fixtures))

    return test


def called_on_compute(work: Callable[[], None]) -> set[str]:
    """Which of swarmnet's own functions `work` runs, by module and name."""
    seen: set[str] = set()

    def trace(frame: FrameType, event: str, arg: Any) -> None:
        name = frame.f_globals.get("__name__", "")
        if event == "call" and name.startswith(("swarmnet", "safetensors", "json", "hashlib")):
            seen.add(f"{name}.{frame.f_code.co_name}")

    sys.setprofile(trace)
    try:
        work()
    finally:
        sys.setprofile(None)
    return seen


@in_a_loop
async def test_the_compute_thread_copies_and_does_nothing_else() -> None:
    async with compute_thread() as compute:
        chain = StageChain(tiny(2), compute)
        await chain.step(random.Random(0))
        engine = chain.engines[0][0]
        jobs: list[set[str]] = []
        run = compute.run

        async def watched(turn: Any, call: Callable[[], Any]) -> Any:
            results: list[Any] = []
            await run(turn, lambda: jobs.append(called_on_compute(lambda: results.append(call()))))
            return results[0]

        compute.run = watched  # type: ignore[method-assign]
        data = await engine.snapshot()
        (job,) = jobs
        foreign = ("seal", "header", "json", "hash", "save", "pack", "memory")
        assert {name for name in job if ".copy" in name}
        assert not {name for name in job if any(word in name for word in foreign)}, job
        jobs.clear()
        await engine.restore(data, version=1)
        (job,) = jobs
        assert {name for name in job if ".take_over" in name} and not {
            name for name in job if any(word in name for word in ("unpack", "json", "load", "largest"))
        }, job


@in_a_loop
async def test_a_snapshot_goes_before_everything_that_is_queued() -> None:
    """Behind it, the version asked for would be gone."""
    async with compute_thread() as compute:
        chain = StageChain(tiny(2), compute)
        engine = chain.engines[0][0]
        go_on = threading.Event()
        order: list[str] = []

        async def note(name: str, work: Any) -> None:
            await work
            order.append(name)

        async with asyncio.TaskGroup() as group:
            blocker = engine._jobs.between_rounds(engine.version, lambda: go_on.wait(30))
            group.create_task(note("blocker", blocker))
            await asyncio.sleep(0)
            group.create_task(note("forward", chain.forward([engine], 0)))
            await asyncio.sleep(0)
            group.create_task(note("snapshot", engine.snapshot()))
            await asyncio.sleep(0)
            go_on.set()
        assert order == ["blocker", "snapshot", "forward"]


@in_a_loop
async def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The write is held up for as long as two steps take, and holds the state of before them."""
    writing, go_on, written = threading.Event(), threading.Event(), asyncio.Event()
    write = CheckpointStore.write

    def slow(self: CheckpointStore, info: Any, data: Any) -> None:
        writing.set()
        assert go_on.wait(60), "training waited for the disk"
        write(self, info, data)

    monkeypatch.setattr(CheckpointStore, "write", slow)
    async with compute_thread() as compute:
        chain = StageChain(tiny(2), compute)
        engine, rng = chain.engines[0][0], random.Random(0)
        store = CheckpointStore(tmp_path, RUN)
        checkpointer = Checkpointer(
            0,
            engine,
            lambda: StateHeader(engine.version, *[Chain("00" * 32)] * 3),
            DirectoryDisk(store),
            CheckpointSchedule(every=1, last=20),
            keep=3,
            on_event=lambda event, fields: written.set(),
        )
        async with asyncio.TaskGroup() as group:
            task = group.create_task(checkpointer.run())
            await chain.step(rng)
            expected = await engine.snapshot()
            checkpointer.reached()
            assert await asyncio.to_thread(writing.wait, 60)
            for _ in range(2):
                await chain.step(rng)
            assert engine.version == 3 and checkpointer.versions == ()
            go_on.set()
            await written.wait()
            task.cancel()
        found = await checkpointer.load(1)
        assert found is not None
        info, data = found
        assert info.version == 1 and data == expected
        await engine.restore(data, version=1)
        assert engine.version == 1 and await engine.snapshot() == expected


@in_a_loop
async def test_snapshots_of_all_versions_have_one_layout_and_are_safetensors() -> None:
    async with compute_thread() as compute:
        chain = StageChain(tiny(2), compute)
        engine = chain.engines[1][0]
        first = await engine.snapshot()
        await chain.step(random.Random(0))
        second = await engine.snapshot()
        assert len(first) == len(second) and first != second
        weights = await weights_of(engine)
        found = load(bytes(second))
        assert all(torch.equal(found[name], weight) for name, weight in weights.items())
        assert len(found) == 3 * len(weights)
        begin = 8 + int.from_bytes(second[:8], "little")
        assert begin % 64 == 0


@in_a_loop
async def test_a_stage_without_parameters_has_a_snapshot() -> None:
    async with compute_thread() as compute:
        manifest = tiny(3, layers=(2, 0, 2))
        engine = torch_engine(manifest, 1, compute, DeviceBackend(manifest.of_stage(1)))
        data = await engine.snapshot()
        await engine.restore(data, version=0)
        assert load(bytes(data)) == {}
