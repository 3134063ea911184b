"""The engine of `stage.engine` in torch: one stage, one device, its jobs on the shared compute thread.

Checks every payload before it computes, and computes on nothing that the optimizer has changed since: a stash belongs
to the weights it was made on, and once they are gone it is refused (backward) or not counted (weight pass). An
activation or gradient that *we* found non-finite, from finite input, raises Refused(VOID): nobody is to blame for the
value of a pure function. Knows no peers, no rounds, no slots.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from swarmnet.errors import Refused, RejectCode
from swarmnet.ids import RoundId
from swarmnet.manifest.schema import Delay, Manifest
from swarmnet.messages import Commit, Packed
from swarmnet.stage import snapshot
from swarmnet.stage.backend import StageBackend
from swarmnet.stage.canonical import Canonical
from swarmnet.stage.compute import ComputeThread, Turn, Work
from swarmnet.stage.engine import Audience, Contribution, OuterStep, Reduced, Stash
from swarmnet.stage.local_sum import LocalSum
from swarmnet.stage.payloads import Payloads
from swarmnet.stage.step_sum import StepSum

T = TypeVar("T")

_LOOK_S = 1.0  # between two looks after idle ranks
_HOST = torch.device("cpu")
"""Where sums are while they travel, also those of a GPU: see `DeviceBackend.sum_memory`."""

_LARGE = 1 << 20  # bytes whose allocation would hold up the event loop


@dataclass(slots=True, eq=False)
class _ForwardWork:
    """What a forward leaves behind, and on which weights. added: what its weight pass has answered."""

    epoch: int
    work: object | None
    added: bool | None = None


class TorchEngine:
    """`stage.engine.Engine` for one stage of `manifest`, computed by `backend`: on a device, or on ranks.

    Begins at version 0, whose weights the backend may have to read: that may raise, and the backend is closed then.
    Ranks are up from `supervise` on, or when they are first needed.

    Besides the contract's errors: Refused(STALE) from forward and backward if the step is applied, or the weights are
    no longer those the stash was made on; Refused(NOT_READY) from forward if the step is not open yet. `accumulate` may
    be asked again after a cancellation and gives the same answer.
    """

    def __init__(self, manifest: Manifest, stage: int, compute: ComputeThread, backend: StageBackend) -> None:
        self._manifest, self._stage, self._compute = manifest, stage, compute
        self._delay, self._exact = manifest.averaging.delay, manifest.numerics.mode == "deterministic"
        self._backend = backend
        self._payloads = Payloads(manifest, stage, device=backend.device)
        self._state, self._accumulators = backend.state, backend.sums
        # A weight pass that only adds what backward has written frees a gradient of the stage, and does not wait.
        self._weights = Work.BACKWARD if backend.writes_at_once else Work.WEIGHTS
        self._epochs = [0] * (1 + self.delay.most)  # counts changes of the weights
        self._sum: StepSum | LocalSum
        if manifest.averaging.sync == "local":
            self._sum = LocalSum(manifest, self._state, self._accumulators[0], device=_HOST)
        else:
            self._sum = StepSum(manifest, self._state, self._accumulators, memory=self._backend.sum_memory())
        self._spare: Tensor | None = None  # memory for the next snapshot
        self._sum_lock = threading.Lock()  # StepSum and what it reads of the state: of one thread at a time
        try:
            self._reset_to_seed()
        except BaseException:
            self.close()
            raise

    def subscribe(self, audience: Audience) -> None:
        self._backend.watch(Posted(asyncio.get_running_loop(), audience))

    async def supervise(self) -> None:
        """Have everything up that computes, as long as this is awaited. Raises MeshFailed: it was given up."""
        while True:
            await self._run(Work.STATE, self.version, 0, self._backend.start)
            await asyncio.sleep(_LOOK_S)

    def close(self) -> None:
        """End the ranks of a mesh; a job that needs them ends with Refused(NOT_READY). Any thread."""
        self._backend.close()

    # ------------------------------------------------------------ what others may read at any time

    @property
    def num_elements(self) -> int:
        """Length of the flat gradient."""
        return self._state.canonical.num_elements

    def snapshot_bytes(self, stage: int) -> int:
        """Bytes of every snapshot of that stage."""
        own = self._state.canonical
        return (own if stage == own.stage else Canonical.of(self._manifest, stage)).layout.num_bytes

    @property
    def phases(self) -> tuple[int, ...]:
        """Lengths of the vectors that a round sums, one after the other."""
        return self._sum.phases

    @property
    def private_phases(self) -> int:
        """How many of `phases`, from the first, are summed among partners only."""
        return self._sum.private_phases

    @property
    def sum_elements(self) -> int:
        """Length of the finished sum of this version."""
        return self._sum.sum_elements

    @property
    def block(self) -> int:
        """Where pieces of a vector may begin: at its multiples."""
        return self._sum.block

    @property
    def delay(self) -> Delay:
        """On which version's weights each step is computed."""
        return self._delay

    def voids(self, step: int) -> int:
        """How often the accumulator that `step` sums in has been voided."""
        return self._accumulators[self._place(step)].voids

    @property
    def version(self) -> int:
        """Version of the weights."""
        return self._state.version

    def void(self, step: int | None = None, *, lost: bool = False) -> None:
        """Empty the accumulator of `step`, or all, and move the void counter. Never waits for the compute thread.

        A step that is applied has nothing left to void. lost: see Engine.
        """
        if step is None:
            for accumulator in self._accumulators:
                accumulator.void(lost=lost)
        elif step >= self.version:
            self._accumulators[self._place(step)].void(lost=lost)

    # ------------------------------------------------------------ microbatches

    async def forward(self, step: int, index: int, payload: Sequence[Packed], *, train: bool) -> Stash:
        """Run the stage on one microbatch."""
        voids = self.voids(step)  # before the job is queued: a void while it waits counts too
        return await self._run(Work.FORWARD, step, index, lambda: self._forward(step, index, voids, payload, train))

    async def backward(self, stash: Stash, gradient: Sequence[Packed]) -> tuple[Packed, ...]:
        """The input gradient. Once per stash."""
        return await self._run(Work.BACKWARD, stash.step, stash.index, lambda: self._backward(stash, gradient))

    async def accumulate(self, stash: Stash) -> bool:
        """The weight pass."""
        added = await self._run(self._weights, stash.step, stash.index, lambda: self._accumulate(stash))
        return added and stash.voids == self.voids(stash.step)  # in the caller's thread: nothing can void in between

    def _forward(self, step: int, index: int, voids: int, payload: Sequence[Packed], train: bool) -> Stash:
        began = time.perf_counter()
        if not self.version <= step <= self.version + self.delay.ahead(self.version):
            code = RejectCode.STALE if step < self.version else RejectCode.NOT_READY
            raise Refused(code, "other weights", step=step, version=self.version)
        tokens, hidden = self._payloads.input(payload)
        stash = Stash(step, index, voids)
        output, work = self._backend.forward(step, tokens, hidden, train=train)
        if self._payloads.last:
            stash.loss_sum, stash.num_tokens = output.item(), tokens[:, 1:].numel()
            if not math.isfinite(stash.loss_sum):
                raise Refused(RejectCode.VOID, "the loss is not finite", index=index)
        else:
            stash.output = self._payloads.output(tokens, output)
        if work is not None:
            stash.saved = _ForwardWork(self._epochs[self._place(step)], work)
        stash.compute_s += time.perf_counter() - began
        return stash

    def _backward(self, stash: Stash, gradient: Sequence[Packed]) -> tuple[Packed, ...]:
        began = time.perf_counter()
        saved = _saved(stash)
        if saved.epoch != self._epochs[self._place(stash.step)]:
            raise Refused(RejectCode.STALE, "the weights have changed since forward", step=stash.step)
        if saved.work is None:
            raise ValueError(f"backward of microbatch {stash.step}/{stash.index} has run already")
        own = self._backend.backward(saved.work, self._payloads.gradient(gradient))
        answer = self._payloads.input_gradient(own)
        stash.compute_s += time.perf_counter() - began
        return answer

    def _accumulate(self, stash: Stash) -> bool:
        began = time.perf_counter()
        saved = _saved(stash)
        if saved.added is not None:
            return saved.added
        work, saved.work, saved.added = saved.work, None, False
        place = self._place(stash.step)
        if saved.epoch != self._epochs[place] or stash.voids != self.voids(stash.step):
            return False
        saved.added = self._backend.accumulate(work, step=stash.step, index=stash.index, voids=stash.voids)
        stash.compute_s += time.perf_counter() - began
        return saved.added

    # ------------------------------------------------------------ averaging

    async def open_round(
        self, round_id: RoundId, *, resent: bool = False, kept: Collection[tuple[int, int, int]] = ()
    ) -> None:
        """What is sent from now on is sent in that round."""
        await self._round(lambda: self._sum.begin(round_id, resent=resent, kept=kept))

    async def contribution(self, start: int, stop: int) -> Packed:
        """Elements [start, stop) of the accumulator under the averaging codec."""
        return await self._round(lambda: self._sum.contribution(start, stop))

    async def reduce(self, contributions: Sequence[Contribution], start: int, stop: int, *, hop: int = 0) -> Reduced:
        """Reduce contributions in the order given, on the CPU: they come from the network and return to it."""
        return await self._round(lambda: self._sum.reduce(contributions, start, stop, hop=hop))

    async def open_sum(self) -> None:
        """Another sum comes into the sum buffer, by `put`."""
        await self._round(self._sum.open)

    async def put(self, start: int, packed: Packed) -> None:
        """Decode a reduced piece into the sum buffer."""
        await self._round(lambda: self._sum.put(start, packed))

    async def next_phase(self) -> None:
        """One vector was put whole; on to the next."""
        await self._round(self._sum.next_phase)

    async def seal(self) -> tuple[bytes, float]:
        """The whole sum was put: its digest and its squared norm."""
        return await self._round(self._sum.seal)

    async def install(self, parts: Sequence[Packed]) -> tuple[bytes, float]:
        """Decode the reduced parts into the sum buffer, all or none."""
        return await self._round(lambda: self._sum.install(parts))

    async def finished_sum(self, start: int, stop: int) -> Packed:
        """Elements [start, stop) of the sum buffer, losslessly."""
        return await self._round(lambda: self._sum.finished(start, stop))

    # ------------------------------------------------------------ versions

    async def apply(self, commits: Sequence[Commit]) -> OuterStep | None:
        """One optimizer step on the sum buffer."""
        return await self._turn(lambda: self._apply(commits))

    async def measure(self) -> tuple[int, bytes]:
        """Digest of the newest weights. At once: later they would be of another version."""
        return await self._run(Work.STATE, self.version, 0, self._measure)

    async def prepare_snapshot(self) -> None:
        """Take the memory for the next snapshot."""
        if self._spare is None:
            self._spare = await self._memory()

    async def snapshot(self) -> memoryview:
        """Weights and optimizer state of this version. The compute thread copies tensors and does nothing else for it.

        At once: behind whatever else is queued, the version asked for would be gone.
        """
        spare, self._spare = self._spare, None
        memory = await self._memory() if spare is None else spare
        version = await self._run(Work.STATE, self.version, 0, lambda: self._state.copy(memory))
        return self._state.canonical.layout.seal(memory, version=version)

    async def _memory(self) -> Tensor:
        layout = self._state.canonical.layout
        return layout.memory() if layout.num_bytes < _LARGE else await asyncio.to_thread(layout.memory)

    async def restore(self, data: bytes | memoryview, *, version: int, becomes: int | None = None) -> None:
        """Take over a snapshot's state; read and checked beside the compute thread."""
        tensors = await asyncio.to_thread(self._state.canonical.unpack, data, version=version)
        await self._turn(lambda: self._take_over(tensors, version if becomes is None else becomes))

    async def reset_to_seed(self) -> None:
        """Back to the weights of version 0."""
        await self._turn(self._reset_to_seed)

    async def memory(self) -> tuple[int, memoryview | None]:
        """(version, what the averaging codec owes from earlier steps): of this replica alone, to be saved beside its
        snapshots. None: this codec forgets nothing. The compute thread copies, and does nothing else for it."""
        version, held = await self._turn(lambda: (self.version, self._sum.memory()))
        if not held:
            return version, None
        return version, await asyncio.to_thread(snapshot.pack, held, stage=self._stage, version=version)

    async def recall(self, data: bytes | memoryview) -> None:
        """Go on from `memory` of the same version, after `restore`. Raises BadMessage; nothing is owed then."""
        await self._turn(lambda: self._sum.recall(data))

    async def weights(self) -> dict[str, Tensor]:
        """Copies of the weights by name, on the CPU."""
        return await self._run(
            Work.BACKGROUND,
            self.version,
            0,
            lambda: {
                name: tensor.detach().to("cpu", copy=True)
                for name, tensor in zip(self._state.canonical.shapes, self._state.newest, strict=True)
            },
        )

    def _apply(self, commits: Sequence[Commit]) -> OuterStep | None:
        applied = self._place(self.version)
        outer = self._sum.apply(commits)
        self._epochs[applied] += 1  # its accumulator's content is of that step: for the next it reads as empty
        return outer

    def _measure(self) -> tuple[int, bytes]:
        return self._state.version, snapshot.digest(self._state.newest)

    def _reset_to_seed(self) -> None:
        self._state.reset_to_seed()
        self._changed()

    def _take_over(self, tensors: Mapping[str, Tensor], version: int) -> None:
        self._state.take_over(tensors, version=version)
        self._changed()

    def _changed(self) -> None:
        """Other weights than the ones the accumulator and the finished sum grew from."""
        self._epochs = [epoch + 1 for epoch in self._epochs]
        self._sum.changed()
        self.void()

    def _place(self, step: int) -> int:
        """Which of the open steps' places is that of `step`."""
        return step % len(self._epochs)

    # ------------------------------------------------------------ jobs and payloads

    async def _round(self, job: Callable[[], T]) -> T:
        """Arithmetic on sums: on the averaging thread. May be left over from a round that was given up."""
        return await self._run(Work.ROUND, self.version, 0, lambda: self._alone(job))

    async def _turn(self, job: Callable[[], T]) -> T:
        """What changes the state, or reads sums: on the compute thread, before all else, and no round meanwhile."""
        return await self._run(Work.STATE, self.version, 0, lambda: self._alone(job))

    def _alone(self, job: Callable[[], T]) -> T:
        with self._sum_lock:
            return job()

    async def _run(self, work: Work, step: int, index: int, job: Callable[[], T]) -> T:
        def guarded() -> T:
            if self._exact and self._backend.device.type == "cpu" and torch.get_num_threads() != 1:
                torch.set_num_threads(1)  # sums inside kernels depend on how many threads share them
            with _current(self._backend.device):
                return job()

        return await self._compute.run(Turn(work, step, -self._stage, index), guarded)


def _current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Each thread has a CUDA device of its own that what names none works on: compiled and foreign kernels, pinning."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _saved(stash: Stash) -> _ForwardWork:
    if not isinstance(stash.saved, _ForwardWork):
        raise ValueError(f"nothing is stashed of microbatch {stash.step}/{stash.index}: it was an evaluation")
    return stash.saved


class Posted:
    """`stage.backend.Watcher` that tells the event loop what a backend finds out, in whatever thread, in order."""

    def __init__(self, loop: asyncio.AbstractEventLoop, audience: Audience) -> None:
        self._loop, self._audience = loop, audience

    def lost(self) -> None:
        self._post(self._audience.on_sums_lost)

    def event(self, event: str, fields: dict[str, object]) -> None:
        self._post(lambda: self._audience.on_engine(event, fields))

    def _post(self, tell: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(tell)
