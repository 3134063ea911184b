"""`stage.interfaces.Compute` in torch: one stage, its jobs on the compute thread of its peer.

Checks every payload before it computes, and computes on nothing that the optimizer has changed since: saved activations
belong to the weights they were made on, and once those are gone they are refused (backward) or not counted
(weight-gradient pass). An activation or gradient that *we* found non-finite, from finite input, raises
Refused(OVERFLOWED): no peer is to blame for the value of a pure function. Knows no peers, no rounds, no slots.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, cast

from torch import Tensor

from swarmnet.bounds import LARGE_BYTES, is_loss
from swarmnet.clock import boot_time
from swarmnet.engine.compute_thread import StageJobs, Work
from swarmnet.engine.payloads import Payloads
from swarmnet.errors import Refused, RejectCode
from swarmnet.manifest.extension import Notice
from swarmnet.messages import Commit, Packed
from swarmnet.stage import snapshot
from swarmnet.stage.backend import StageBackend
from swarmnet.stage.interfaces import Audience, OuterStep, PastWork, Recomputed, SavedActivations, Summation

T = TypeVar("T")
Encode = Callable[[], tuple[Packed, ...]]
"""Encodes what a job has left."""

_LOOK_S = 1.0  # between two looks after idle ranks


class StageSums(Summation, Protocol):
    """What an engine asks of the sums of its stage, on the compute thread and between rounds."""

    def apply(self, commits: Sequence[Commit]) -> OuterStep | None:
        """Lead the state on to the next version with the finished sum. Raises ValueError if there is none."""

    def changed(self) -> None:
        """The state is another: no sum leads on from it."""

    def stands_for(self, contribution: Tensor, seed: bytes) -> bytes:
        """What is pledged of a whole contribution, which is flat: see `Compute.recompute`. On the CPU or not. Any
        thread."""
        return b""  # sums of local sync are not audited


@dataclass(slots=True, eq=False)
class _ForwardWork:
    """What a forward leaves behind, and on which weights. asked_slow: as `Payloads` says of its input. added: what its
    weight pass has answered."""

    epoch: int
    work: object | None
    asked_slow: bool
    added: bool | None = None


class TorchEngine:
    """`stage.interfaces.Compute` of one stage on `backend`. Begins at version 0, with the weights of the seed or of the
    checkpoint that the run begins with; reading that may raise. A backend of ranks is to be closed; they are up from
    `supervise` on, or when they are first needed.

    Args:
        sums: of the same backend, with the same `jobs`.
        snapshot_bytes: by stage of the run.

    Besides the contract's errors: Refused(STALE) from forward and backward if the step is applied, or the weights are
    no longer those of the forward; Refused(NOT_READY) from forward if the step is not open yet. `accumulate` may
    be asked again after a cancellation and gives the same answer.
    """

    def __init__(
        self,
        backend: StageBackend,
        sums: StageSums,
        jobs: StageJobs,
        payloads: Payloads,
        *,
        snapshot_bytes: Callable[[int], int],
    ) -> None:
        self._backend, self.sums, self._jobs, self._payloads = backend, sums, jobs, payloads
        # Small ones are coded in less time than it takes to change threads.
        self._codes_apart = backend.apart and payloads.num_bytes >= LARGE_BYTES
        self.snapshot_bytes = snapshot_bytes
        self._state, self._accumulators = backend.state, backend.sums
        self.delay = backend.state.canonical.spec.averaging.delay
        # A weight pass that only adds what backward has written frees a gradient of the stage, and does not wait.
        self._weights = Work.BACKWARD if backend.writes_at_once else Work.WEIGHTS
        self._epochs = [0] * (1 + self.delay.most)  # counts changes of the weights
        self._spare: Tensor | None = None  # memory for the next snapshot
        self._audits = 0  # that run or wait
        self._started = asyncio.Event()
        self._weights_stay = threading.Lock()  # held while the weights are changed or measured
        try:
            self._reset_to_seed()
        except BaseException:
            self.close()
            raise

    def subscribe(self, audience: Audience) -> None:
        loop = asyncio.get_running_loop()

        def post(tell: Callable[..., None], *facts: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: there is no receiver any more
                loop.call_soon_threadsafe(tell, *facts)

        self._backend.watch(functools.partial(post, audience.on_sums_lost), functools.partial(post, audience.on_engine))

    async def supervise(self) -> None:
        """Keep whatever computes running for as long as this is awaited. Raises MeshFailed if it was given up."""
        while True:
            await self._between(self._backend.start)
            self._started.set()
            await asyncio.sleep(_LOOK_S)

    async def ready(self) -> None:
        """Return once `supervise` has started what computes, where it does not compute in this process."""
        if self._backend.apart:
            await self._started.wait()

    def close(self) -> None:
        """End the ranks of a mesh; a job that needs them ends with Refused(NOT_READY). Any thread."""
        self._backend.close()

    # ------------------------------------------------------------ what others may read at any time

    def discards(self, step: int) -> int:
        """How often the accumulator of `step` was emptied."""
        return self._accumulators[self._slot_of(step)].discards

    @property
    def version(self) -> int:
        """Version of the weights."""
        return self._state.version

    def discard(self, step: int | None = None) -> None:
        """Empty the accumulator of `step`, or all, and move the discard counter. Never waits for the compute thread.

        A step that is applied has nothing left to discard.
        """
        if step is None:
            for accumulator in self._accumulators:
                accumulator.discard()
        elif step >= self.version:
            self._accumulators[self._slot_of(step)].discard()

    def carries(self, bytes_per_s: int) -> None:
        """Chooses between the run's codecs for activations and their gradients."""
        self._payloads.carries(bytes_per_s)

    def lengthen(self, notices: tuple[Notice, ...]) -> None:
        """Changes nothing but the rates of updates, and which step is the last."""
        self._state.canonical.notices = notices

    # ------------------------------------------------------------ microbatches

    async def forward(self, step: int, index: int, payload: Sequence[Packed], *, train: bool) -> SavedActivations:
        """Run the stage on one microbatch."""
        # Before the job is queued: a discard while it waits counts too.
        stash, payloads = SavedActivations(step, index, self.discards(step)), self._payloads

        def run(received: tuple[Tensor, Tensor | None]) -> Encode:
            return self._forward(stash, *received, train=train, asked_slow=payloads.asked_slow(payload))

        stash.output = await self._pass(Work.FORWARD, stash, lambda: payloads.input(payload), run)
        return stash

    async def backward(self, stash: SavedActivations, gradient: Sequence[Packed]) -> tuple[Packed, ...]:
        """The input gradient. Once per forward."""
        decode = lambda: self._payloads.gradient(gradient)  # noqa: E731
        return await self._pass(Work.BACKWARD, stash, decode, lambda received: self._backward(stash, received))

    async def _pass(
        self, work: Work, stash: SavedActivations, decode: Callable[[], T], run: Callable[[T], Encode]
    ) -> tuple[Packed, ...]:
        """Decode what was sent, run the job on it, encode what leaves: on the compute thread. Where ranks compute, that
        only waits for them; so large payloads are coded on other threads."""
        asked, apart = boot_time(), self._codes_apart
        early = await asyncio.to_thread(decode) if apart else None

        def job() -> Encode:
            received = cast(T, early) if apart else decode()
            began = boot_time()
            encode = run(received)
            left = None if apart else encode()
            stash.computed(asked, began, boot_time())
            return encode if left is None else lambda: left

        encode = await self._jobs.run(work, stash.step, stash.index, job)
        return await asyncio.to_thread(encode) if apart else encode()

    async def accumulate(self, stash: SavedActivations) -> bool:
        """The weight pass."""
        asked = boot_time()
        added = await self._jobs.run(self._weights, stash.step, stash.index, lambda: self._accumulate(stash, asked))
        # In the caller's thread: nothing can discard in between.
        return added and stash.discards == self.discards(stash.step)

    def _forward(
        self, stash: SavedActivations, tokens: Tensor, hidden: Tensor | None, *, train: bool, asked_slow: bool
    ) -> Encode:
        step = stash.step
        if not self.version <= step <= self.version + self.delay.ahead(self.version):
            code = RejectCode.STALE if step < self.version else RejectCode.NOT_READY
            raise Refused(code, "other weights", step=step, version=self.version)
        output, work = self._backend.forward(step, tokens, hidden, train=train)
        if work is not None:
            stash.saved = _ForwardWork(self._epochs[self._slot_of(step)], work, asked_slow)
        if not self._payloads.last:
            return lambda: self._payloads.output(tokens, output)
        stash.loss_sum, stash.num_tokens = output.item(), tokens[:, 1:].numel()
        if not is_loss(stash.loss_sum, stash.num_tokens):
            raise Refused(RejectCode.OVERFLOWED, "the loss is not finite, or absurd", index=stash.index)
        return tuple

    def _backward(self, stash: SavedActivations, gradient: Tensor | None) -> Encode:
        saved = _saved(stash)
        # The weights that this forward used are gone.
        if saved.epoch != self._epochs[self._slot_of(stash.step)]:
            raise Refused(RejectCode.STALE, "the weights have changed since forward", step=stash.step)
        if saved.work is None:
            raise ValueError(f"backward of microbatch {stash.step}/{stash.index} has run already")
        own = self._backend.backward(saved.work, gradient)
        return lambda: self._payloads.input_gradient(own, asked_slow=saved.asked_slow)

    def _accumulate(self, stash: SavedActivations, asked: float) -> bool:
        began = boot_time()
        saved = _saved(stash)
        # Asked again after a cancellation: the same answer, and nothing is added twice.
        if saved.added is not None:
            return saved.added
        # Ended first: if the backend raises, this work must not run again.
        work, saved.work, saved.added = saved.work, None, False
        slot = self._slot_of(stash.step)
        # Emptied or applied meanwhile: the gradient belongs to no aggregate any more.
        if saved.epoch != self._epochs[slot] or stash.discards != self.discards(stash.step):
            return False
        saved.added = self._backend.accumulate(work, step=stash.step, index=stash.index, discards=stash.discards)
        stash.computed(asked, began, boot_time())
        return saved.added

    # ------------------------------------------------------------ microbatches of steps that are over

    async def recompute(
        self, step: int, works: Sequence[PastWork], seed: bytes = b""
    ) -> tuple[tuple[Recomputed, ...], bytes]:
        """Microbatches again, with a seed a whole contribution."""
        with self._auditing(step):
            share = await self._between(self._backend.new_share) if seed else None
            again, turn = functools.partial(self._recompute, step, share), self.version + 1
            jobs = [self._jobs.run(Work.AUDIT, turn, work[0], functools.partial(again, work)) for work in works]
            # All of them are queued now: one after the other, each would wait for the end of a step of its own.
            found = tuple(map(_or_raise, await asyncio.gather(*jobs, return_exceptions=True)))
            if share is None:
                return found, b""
            total = await self._between(lambda: self._backend.read_share(share, step))
            return found, await asyncio.to_thread(self.sums.stands_for, total, seed)

    async def _between(self, job: Callable[[], T]) -> T:
        return await self._jobs.run(Work.STATE, self.version, 0, job)

    def _recompute(self, step: int, share: object | None, work: PastWork) -> Recomputed:
        (index, inputs, gradient), last = work, self._payloads.last
        (tokens, hidden), received = self._payloads.input(inputs), self._payloads.gradient(gradient)
        # An update may have come since this was asked, and replaced the oldest weights.
        weights = self._backend.past.get(step)
        if weights is None:
            raise _not_kept(step)
        output, own = self._backend.recompute(weights, index, tokens, hidden, received, share)
        sent = () if last else self._payloads.output(tokens, output)
        loss = (output.item(), tokens[:, 1:].numel()) if last else (0.0, 0)
        return Recomputed(sent, self._payloads.input_gradient(own, asked_slow=False), *loss)

    @contextlib.contextmanager
    def _auditing(self, step: int) -> Iterator[None]:
        """While it lasts the backend may hold memory for that. Raises Refused(NOT_READY)."""
        if self._backend.past.get(step) is None:
            raise _not_kept(step)
        self._audits += 1
        try:
            yield
        finally:
            self._audits -= 1
            if not self._audits:
                self._backend.end_recomputing()

    # ------------------------------------------------------------ versions

    async def apply(self, commits: Sequence[Commit]) -> OuterStep | None:
        """One optimizer step on the sum buffer."""
        return await self._jobs.between_rounds(self.version, lambda: self._apply(commits))

    async def measure(self) -> tuple[int, bytes]:
        """Digest of the newest weights, made in parallel to compute. The next update waits for it."""

        def digested() -> tuple[int, bytes]:
            with self._weights_stay:
                return self._state.version, snapshot.digest(self._state.newest)

        return await asyncio.to_thread(digested)

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
        version = await self._between(lambda: self._state.copy(memory))
        return self._state.canonical.layout.seal(memory, version=version)

    async def _memory(self) -> Tensor:
        layout = self._state.canonical.layout
        return layout.memory() if layout.num_bytes < LARGE_BYTES else await asyncio.to_thread(layout.memory)

    async def restore(self, data: bytes | memoryview, *, version: int, becomes: int | None = None) -> None:
        """Take over a snapshot's state; read and checked outside of the compute thread."""
        tensors = await asyncio.to_thread(self._state.canonical.unpack, data, version=version)
        await self._jobs.between_rounds(
            self.version, lambda: self._take_over(tensors, version if becomes is None else becomes)
        )

    async def reset_to_seed(self) -> None:
        """Back to the weights of version 0."""
        await self._jobs.between_rounds(self.version, self._reset_to_seed)

    def _apply(self, commits: Sequence[Commit]) -> OuterStep | None:
        applied = self._slot_of(self.version)
        with self._weights_stay:
            self._backend.past.note(self.version)
            outer = self.sums.apply(commits)
        self._epochs[applied] += 1  # its accumulator's content is of that step: for the next it reads as empty
        return outer

    def _reset_to_seed(self) -> None:
        with self._weights_stay:
            self._state.reset_to_seed()
        self._changed()

    def _take_over(self, tensors: Mapping[str, Tensor], version: int) -> None:
        with self._weights_stay:
            self._state.take_over(tensors, version=version)
        self._changed()

    def _changed(self) -> None:
        """Other weights than the ones the accumulator and the finished sum grew from."""
        self._backend.past.forget()
        self._epochs = [epoch + 1 for epoch in self._epochs]
        self.sums.changed()
        self.discard()

    def _slot_of(self, step: int) -> int:
        """The slot of `step` among those of the open steps."""
        return step % len(self._epochs)


def _or_raise(found: T | BaseException) -> T:
    try:
        if isinstance(found, BaseException):
            raise found
        return found
    finally:
        del found  # an error holds this frame, and those that hold a share


def _not_kept(step: int) -> Refused:
    return Refused(RejectCode.NOT_READY, "no weights of that step are kept here", step=step)


def _saved(stash: SavedActivations) -> _ForwardWork:
    if not isinstance(stash.saved, _ForwardWork):
        raise ValueError(f"nothing is saved of microbatch {stash.step}/{stash.index}: it was an evaluation")
    return stash.saved
