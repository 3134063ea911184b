"""benchmarks/mesh.py's second part: what an order to the ranks costs, and how soon they are back after a kill.

The ranks are `ranks.supervisor.RankGroup`'s; this module is also the program they run.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from swarmnet.errors import RankLost
from swarmnet.ranks.process import Handler, RankContext
from swarmnet.ranks.supervisor import RankGroup

ORDER = {"key": 17, "step": 3, "index": 5, "voids": 0, "train": True}
"""About what a microbatch's order says."""

GLOO_BYTES = 256
"""Enough for an order, as broadcasts know their length beforehand."""

SHARED_BYTES = 1 << 26


# ---------------------------------------------------------------- on the ranks


def program(context: RankContext) -> Handler:
    """Answers orders, and passes broadcasts round."""
    words = torch.zeros(GLOO_BYTES, dtype=torch.uint8, device=context.device)
    byte = torch.zeros(1, dtype=torch.uint8, device=context.device)

    def handle(name: str, fields: Mapping[str, Any]) -> Mapping[str, Any] | None:
        if name == "broadcasts":
            return {"seconds": _broadcasts(context, words, byte, fields["times"])}
        return None

    return handle


def _broadcasts(context: RankContext, words: torch.Tensor, byte: torch.Tensor, times: int) -> float:
    """Seconds for one order by broadcast from rank 0, and the answers gathered there."""
    answers = [torch.empty_like(byte) for _ in range(context.ranks)] if context.rank == 0 else None
    dist.barrier()
    began = time.perf_counter()
    for _ in range(times):
        dist.broadcast(words, 0)
        words[0].item()  # the order is read
        dist.gather(byte, answers, 0)
        if answers is not None:
            answers[-1].item()
    return (time.perf_counter() - began) / times


# ---------------------------------------------------------------- orders


def orders(devices: Sequence[str], *, turns: int, times: int) -> dict[str, list[float]]:
    """Seconds per round trip and turn, of each way: to all ranks and back from all."""
    seconds: dict[str, list[float]] = {"order": [], "broadcast": [], "pipe": []}
    with ranks(devices) as group, bare_pipes(len(devices)) as pipes:
        for turn in range(1 + turns):  # the first warms up
            found = {
                "order": _orders(group, times),
                "pipe": _pipes(pipes, times),
                "broadcast": group.order("broadcasts", times=times)[0]["seconds"],
            }
            for way, took in found.items():
                seconds[way] += [took] if turn else []
    return seconds


def _orders(group: RankGroup, times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        group.order("forward", **ORDER)
    return (time.perf_counter() - began) / times


def _pipes(pipes: Sequence[Connection], times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        for pipe in pipes:
            pipe.send(("forward", ORDER))
        for pipe in pipes:
            pipe.recv()
    return (time.perf_counter() - began) / times


@contextlib.contextmanager
def ranks(devices: Sequence[str]) -> Iterator[RankGroup]:
    """Started ranks with some shared memory."""
    group = RankGroup(
        "mesh_orders:program", {}, devices=devices, deadline_s=60.0, memory={"some": ((SHARED_BYTES,), "uint8")}
    )
    try:
        group.start()
        yield group
    finally:
        group.close()


@contextlib.contextmanager
def bare_pipes(count: int) -> Iterator[list[Connection]]:
    """Pipes of `multiprocessing` to as many processes that answer whatever comes."""
    context = multiprocessing.get_context("spawn")
    ends = [context.Pipe() for _ in range(count)]
    jobs = [context.Process(target=echo, args=(there,)) for _, there in ends]
    try:
        for job, (_, there) in zip(jobs, ends, strict=True):
            job.start()
            there.close()
        yield [here for here, _ in ends]
    finally:
        for here, _ in ends:
            here.close()
        for job in jobs:
            job.join(10.0)


def echo(pipe: Connection) -> None:
    """Until the other end closes."""
    with contextlib.suppress(EOFError):
        while True:
            pipe.recv()
            pipe.send({})


# ---------------------------------------------------------------- restarts


def restarts(devices: Sequence[str], *, times: int) -> dict[str, list[float]]:
    """Seconds from the SIGKILL of one rank until the peer process knows ("noticed"), and from there until all ranks
    take orders again ("back"); and of a cold `python -c "import torch"`, in turns."""
    seconds: dict[str, list[float]] = {"noticed": [], "back": [], "import torch": []}
    with ranks(devices) as group:
        for turn in range(times):
            began = time.perf_counter()
            os.kill(group.pids[turn % len(devices)], signal.SIGKILL)
            with contextlib.suppress(RankLost):
                while True:
                    group.order("forward", **ORDER)
            noticed = time.perf_counter()
            group.start()
            group.order("forward", **ORDER)
            back = time.perf_counter()
            subprocess.run([sys.executable, "-c", "import torch"], check=True)
            for what, took in (
                ("noticed", noticed - began),
                ("back", back - noticed),
                ("import torch", time.perf_counter() - back),
            ):
                seconds[what].append(took)
    return seconds
