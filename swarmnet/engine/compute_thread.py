"""The compute thread and the averaging thread: one job at a time each, and which one next.

Live tensors and autograd belong to the compute thread. The work of an aggregation round (encode, decode, reduce, hash)
runs in parallel, on the averaging thread: torch and hashlib let go of the interpreter meanwhile, so neither holds up
the other while there is a core for both. One pair serves all stages of a peer. Order of compute:

1. apply, snapshots, other weights: every replica of the stage, then every stage, waits for them;
2. the older step, all of it: where two are open, the run waits for that one. In a step:
   a. backward: it frees memory, and the stage before waits for it;
   b. forward;
   c. weight-gradient passes: no other stage waits for one (zero bubble, arXiv:2401.10241), but the step waits for all.
   They run
      when nothing above is queued - which must happen, since a step has finitely many microbatches and the next but
      `delay` cannot begin without them. Each holds activations meanwhile, so once more than `max_deferred` are queued
      the first of them goes before the next forward: memory is bounded, and none starves. Where backward has written
      the gradients already (`stage.passes`) it only adds them and frees memory, and its turn is a backward's;
   d. what is computed again of a step that is over: asked for at version v, after all of step v + 1, before step v + 2.

Then later stage, then lower index, then first come; of averaging jobs, too, the older step first. `JobQueue` decides,
purely.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import heapq
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from swarmnet.errors import DeviceFull

T = TypeVar("T")
J = TypeVar("J")

MAX_DEFERRED = 4
"""Weight passes that may wait while forwards go first."""


class Work(enum.IntEnum):
    """What a job is, the most urgent first. ROUND: for the averaging thread. AUDIT: of a step that is over."""

    ROUND = 0
    STATE = 1
    BACKWARD = 2
    FORWARD = 3
    WEIGHTS = 4
    AUDIT = 5


@dataclass(frozen=True, slots=True)
class Turn:
    """What a job is. `later_stage` is the stage's number, negated."""

    work: Work
    step: int
    later_stage: int
    index: int

    @property
    def urgency(self) -> tuple[int, ...]:
        """The lowest runs first, weight passes apart."""
        return self.work > Work.STATE, self.step, self.work, self.later_stage, self.index


class JobQueue(Generic[J]):
    """Queued jobs in the order of the module's docstring. Not thread safe."""

    def __init__(self, *, max_deferred: int = MAX_DEFERRED) -> None:
        self._max_deferred = max_deferred
        self._ticket = itertools.count()
        self._jobs: list[tuple[tuple[int, ...], int, Turn, J]] = []
        self._weights: list[tuple[tuple[int, ...], int, Turn, J]] = []

    def __len__(self) -> int:
        return len(self._jobs) + len(self._weights)

    def push(self, turn: Turn, job: J) -> None:
        """Queue a job."""
        queue = self._weights if turn.work is Work.WEIGHTS else self._jobs
        heapq.heappush(queue, (turn.urgency, next(self._ticket), turn, job))

    def pop(self) -> J:
        """Take out the next job. Raises IndexError if there is none."""
        if not self._weights:
            return heapq.heappop(self._jobs)[-1]
        # Deferred weight passes hold activations: of too many, one goes before the next forward.
        limit = Work.FORWARD if len(self._weights) > self._max_deferred else Work.WEIGHTS
        if self._jobs:
            turn, deferred = self._jobs[0][2], self._weights[0][2]
            # State work always goes first; else only work of the same or an older step goes before a weight pass.
            if turn.work < Work.BACKWARD or (turn.work < limit and turn.step <= deferred.step):
                return heapq.heappop(self._jobs)[-1]
        return heapq.heappop(self._weights)[-1]

    def clear(self) -> list[J]:
        """Take out all jobs."""
        jobs = [entry[-1] for entry in (*self._jobs, *self._weights)]
        self._jobs, self._weights = [], []
        return jobs


class _JobThread:
    """One thread and its queue."""

    def __init__(self, name: str) -> None:
        self._queue: JobQueue[tuple[Callable[[], Any], Future[Any]]] = JobQueue()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    async def run(self, turn: Turn, call: Callable[[], T]) -> T:
        outcome: Future[T] = Future()
        with self._changed:
            if self._closed:
                raise asyncio.CancelledError("the compute thread is closed")
            self._queue.push(turn, (call, outcome))
            self._changed.notify()
        try:
            return await asyncio.wrap_future(outcome)
        finally:
            del outcome  # it holds an error, which holds this frame

    def close(self) -> None:
        with self._changed:
            self._closed = True
            dropped = self._queue.clear()
            self._changed.notify()
        # Callers of dropped jobs must not wait for ever.
        for _, outcome in dropped:
            outcome.cancel()
        self._thread.join()

    def _next(self) -> tuple[Callable[[], Any], Future[Any]] | None:
        with self._changed:
            while not self._queue and not self._closed:
                self._changed.wait()
            return None if self._closed else self._queue.pop()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            call, outcome = job
            if outcome.set_running_or_notify_cancel():
                try:
                    outcome.set_result(call())
                # Not swallowed: raised again where the job is awaited.
                except BaseException as error:
                    outcome.set_exception(error)
            # The closure and the outcome hold activations, and an error holds this frame.
            del job, call, outcome


class ComputeThread:
    """Owns the device, together with the averaging thread. `run` from an event loop, `close` when stages are done."""

    def __init__(self) -> None:
        self._compute, self._averaging = _JobThread("compute"), _JobThread("averaging")

    async def run(self, turn: Turn, call: Callable[[], T]) -> T:
        """Run `call` on its thread when its turn comes; returns or raises what it does.

        Cancelling drops a queued job; a running one finishes and its result is dropped. CancelledError if closed.
        """
        return await (self._averaging if turn.work is Work.ROUND else self._compute).run(turn, call)

    def close(self) -> None:
        """Finish the running jobs, cancel the queued ones, end the threads. Idempotent."""
        self._compute.close()
        self._averaging.close()


class StageJobs:
    """The jobs of one stage on the threads of its peer.

    device: that compute is on. reproducible: equal work is to give equal bits.
    """

    def __init__(self, threads: ComputeThread, stage: int, device: torch.device, *, reproducible: bool) -> None:
        self._threads, self._stage, self._device = threads, stage, device
        self._one_core = reproducible and device.type == "cpu"
        self._sums = threading.Lock()  # the sums, and what they read of the state: of one thread at a time

    async def run(self, work: Work, step: int, index: int, job: Callable[[], T]) -> T:
        """Run `job` on its thread when its turn comes; see `ComputeThread.run`. Raises DeviceFull."""

        def guarded() -> T:
            if self._one_core and torch.get_num_threads() != 1:
                torch.set_num_threads(1)  # sums inside kernels depend on how many threads share them
            try:
                with _current(self._device):
                    return job()
            except torch.OutOfMemoryError as error:
                words = str(error).partition(". ")[0]
            # Only here are the error's frames gone, with the tensors that they held.
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            raise DeviceFull(words)

        return await self._threads.run(Turn(work, step, -self._stage, index), guarded)

    async def in_round(self, step: int, job: Callable[[], T]) -> T:
        """Arithmetic on sums: on the averaging thread. May be left over from a round that was given up."""
        return await self.run(Work.ROUND, step, 0, lambda: self._alone(job))

    async def between_rounds(self, step: int, job: Callable[[], T]) -> T:
        """What changes the state, or reads sums: on the compute thread, before all else, and no round meanwhile."""
        return await self.run(Work.STATE, step, 0, lambda: self._alone(job))

    def _alone(self, job: Callable[[], T]) -> T:
        with self._sums:
            return job()


def _current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Each thread has a CUDA device of its own that what names none works on: compiled and foreign kernels, pinning."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
