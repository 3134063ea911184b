"""From a replica's accumulator to the finished sum of its stage, piece by piece: the arithmetic of an averaging round.

What it contributes and reduces goes through the run's codec and reducer; what comes back is put together and digested.
Knows rounds by their ids only, and no peers but as names of contributions.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from swarmnet.audit.pledge import sum_root, whole_of
from swarmnet.config.plug_in import split
from swarmnet.engine.compute_thread import StageJobs
from swarmnet.engine.payloads import blameless, check_codec
from swarmnet.engine.torch_engine import StageSums
from swarmnet.errors import BadMessage, Refused, RejectCode
from swarmnet.ids import RoundId
from swarmnet.manifest.codec_names import rank
from swarmnet.messages import LARGEST_NORM, Commit, Packed
from swarmnet.stage import snapshot
from swarmnet.stage.accumulator import check_fixed_point, largest_magnitude
from swarmnet.stage.backend import GradientSum, State
from swarmnet.stage.seams import Contribution, Reduced
from swarmnet.sums import linear
from swarmnet.sums.powersgd import PowerSGDCodec
from swarmnet.sums.reducer import PartReducer
from swarmnet.sums.sum_buffer import SumBuffer
from swarmnet.sums.sum_codec import SumCodec
from swarmnet.wire import codecs
from swarmnet.wire.codec import num_elements

_SMALL_BYTES, _INT64_BYTES = 0.7, 4.0
"""Of an element of a packed sum, about: of the small grid, and of the fine one."""

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound="RoundSum")


def in_round(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """Have a method run on the averaging thread, alone with the sums. Its caller awaits it."""

    @functools.wraps(method)
    async def run(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.jobs.in_round(self.state.version, lambda: method(self, *args, **kwargs))

    return run


class RoundSum(StageSums):
    """What the sums of a stage have in common, whatever a round sums: the state they lead on from, and a codec."""

    forgotten: int
    """How often the codec is to forget what it owes."""

    def __init__(self, jobs: StageJobs, state: State, device: torch.device, *, codec: str = "") -> None:
        self.jobs, self.state, self.canonical = jobs, state, state.canonical
        family, parameter = split(name := codec or self.canonical.spec.averaging.codec)
        shapes = self.canonical.parameter_shapes
        self.codec: SumCodec | PowerSGDCodec
        if family == "powersgd":
            self.codec = PowerSGDCodec(rank(parameter), shapes, device=device)
        else:
            self.codec = SumCodec(name, shapes, self.canonical.num_elements, device=device)

    @property
    def num_elements(self) -> int:
        return self.canonical.num_elements

    @property
    def block(self) -> int:
        return self.codec.block

    def stands_for(self, contribution: Tensor, seed: bytes) -> bytes:
        """Its root; of a sum with that seed, its product too."""
        root = sum_root(linear.piece_digests(contribution))
        return whole_of(root, linear.drawn(seed, self.num_elements).product(contribution)) if seed else root

    async def memory(self) -> tuple[int, memoryview | None]:
        """(version, what the codec remembers of earlier steps), packed like a snapshot; None: it remembers nothing.

        It belongs to this replica, so it is no part of the stage's state, which all replicas hold and hand on alike.
        """

        def copied() -> tuple[int, dict[str, Tensor]]:
            held = {name: tensor.to("cpu", copy=True) for name, tensor in self.codec.memory.items()}
            return self.state.version, held

        version, held = await self.jobs.between_rounds(self.state.version, copied)
        if not held:
            return version, None
        return version, await asyncio.to_thread(snapshot.pack, held, stage=self.canonical.stage, version=version)

    async def recall(self, data: bytes | memoryview) -> None:
        """Go on from `memory` of the same version. Raises BadMessage; what was remembered before stays then."""

        def take_over() -> None:
            shapes = {name: tensor.shape for name, tensor in self.codec.memory.items()}
            saved = snapshot.unpack(data, shapes, stage=self.canonical.stage, version=self.state.version)
            self.codec.recall(saved, voids=self.forgotten)

        await self.jobs.between_rounds(self.state.version, take_over)


class StepSum(RoundSum):
    """The sums of one stage, always of the version that `state` is at: of the oldest open step.

    accumulators: step s sums in accumulators[s % len]. memory: where the finished sum is put together. If the
    accumulator of the step that is averaged is voided, the codec forgets its error feedback. It keeps it if another
    open step is voided, which has contributed nothing yet, and if the sums are lost: ranks that died never held the
    feedback.

    Positions count through all `phases`, the vectors that a round sums one after the other; for most codecs there is
    one, the flat gradient itself. Raises BadMessage for what a peer sent, Refused(VOID) for a result of our own that is
    not finite.
    """

    def __init__(self, jobs: StageJobs, state: State, accumulators: Sequence[GradientSum], *, memory: Tensor) -> None:
        super().__init__(jobs, state, memory.device)
        spec = state.canonical.spec
        self._accumulators = accumulators
        self._accumulator = accumulators[0]  # of the oldest open step
        self._revoked_then = self._before = 0
        self._voids: int | None = None  # of the accumulator, as the round began that I take part in
        self._fixed_point = spec.numerics.integers
        self._lossless, self._plain = ("small", "int64") if self._fixed_point else ("fp32", "fp32")
        self._num_microbatches = spec.training.microbatches
        self._sum = SumBuffer.over(memory)
        self._version = -1  # the version the finished sum leads on from
        self._arriving = self.codec.buffer(self._sum)
        self._reducer = PartReducer(spec.averaging, fixed_point=self._fixed_point, most=state.most)
        self._said: Packed | None = None  # the last piece that I contributed
        self._center: Tensor | None = None  # what the last step's mean was, where the reducer asks for it
        self._center_version = -1  # the version it led to

    @property
    def phases(self) -> tuple[int, ...]:
        """Lengths of the vectors that a round sums."""
        return self.codec.phases

    @property
    def flat(self) -> Tensor:
        """The finished sum. Raises ValueError if there is none of this version."""
        if self._version != self.state.version:
            raise ValueError(f"no finished sum of version {self.state.version} is installed")
        return self._sum.flat

    # ------------------------------------------------------------ taking part in a round

    @in_round
    def open_round(
        self, round_id: RoundId, *, resent: bool = False, kept: Collection[tuple[int, int, int]] = ()
    ) -> None:
        """Open that round: later contributions and reductions belong to it, and so do those kept of the last one."""
        self._voids = self._accumulator.voids
        self.codec.begin(round_id, voids=self.forgotten, resent=resent, kept=kept)

    @in_round
    def contribution(self, start: int, stop: int, reference: bytes = b"") -> Packed:
        """Positions [start, stop) of the accumulator under the averaging codec.

        Raises Refused(NOT_READY) if the accumulator was voided since the round began. Another piece may have been sent
        already, and all pieces must be of one sum, or the codec would remember a wrong residual.
        """
        check_part(start, stop, sum(self.phases))
        with blameless(self.canonical.stage):
            self._said = self.codec.contribution(self._frozen(), start, stop, voids=self.forgotten)
        return self._said

    @in_round
    def reduce(self, contributions: Sequence[Contribution], start: int, stop: int, *, hop: int = 0) -> Reduced:
        """Reduce contributions in the order given, on the CPU: they come from the network and return to it."""
        mine = self._said if len(contributions) == 1 and contributions[0].packed is self._said else None
        # Nobody else contributes, and integers have one encoding: the sum of my piece is my piece.
        if mine is not None and self._fixed_point and mine.codec == self.codec.reduced:
            return Reduced(mine)
        center = None
        # A mean of another version would pull towards old weights.
        if self._center is not None and self._center_version == self.state.version:
            center = self._center[start:stop]
        total, clipped = self._reducer(contributions, stop - start, center, hop=hop)
        with blameless(self.canonical.stage):
            return Reduced(self.codec.sum(total, start, voids=self.forgotten, hop=hop), clipped)

    @in_round
    def open_sum(self) -> None:
        """Empty the sum buffer for another sum."""
        self._open()

    def _open(self) -> None:
        self.state.settle()
        self._sum.open()
        self._arriving.open()
        self._version = -1

    @in_round
    def put(self, start: int, packed: Packed) -> None:
        """Decode a reduced piece, its first element at position `start`."""
        check_codec(packed, self.codec.reduced)
        size = num_elements(packed.shape)
        place = self._arriving.place(start, size)
        if self._fixed_point:
            self._check_range(codecs.decode_integers(place, packed, add=False))
        else:
            codecs.decode_into(place, packed)  # which has checked enough
        self._arriving.written(start, size)

    @in_round
    def next_phase(self) -> None:
        """This phase's vector is whole here, and another is to be summed."""
        with blameless(self.canonical.stage):
            self.codec.next_phase(voids=self.forgotten)

    @in_round
    def seal(self) -> tuple[bytes, float]:
        """The digest of the whole sum, once every piece was put, and its squared norm."""
        with blameless(self.canonical.stage, only=RejectCode.NON_FINITE):
            self.codec.finish(self._sum)
        return self._sealed()

    # ------------------------------------------------------------ the check of reducers

    @property
    def pledged(self) -> bool:
        """Where what was contributed can be encoded again."""
        return self.state.canonical.spec.averaging.equal_bits

    @in_round
    def pieces(self, start: int, stop: int) -> list[bytes]:
        """Digests of the accumulator's pieces in [start, stop)."""
        check_part(start, stop, self.num_elements)
        return linear.piece_digests(self._frozen()[start:stop])

    @in_round
    def prove(self, seed: bytes) -> int:
        """The product of my accumulator."""
        return linear.drawn(seed, self.num_elements).product(self._frozen())

    @in_round
    def weigh(self, packed: Packed | None, start: int, stop: int, seed: bytes) -> int:
        """The product of one contribution, or of the sum in the buffer, in [start, stop)."""
        check_part(start, stop, self.num_elements)
        if packed is None:
            piece = self._sum.flat[start:stop]
        else:
            check_codec(packed, self.codec.contributed)
            piece = codecs.decode(packed, expect_shape=(stop - start,))
        return linear.drawn(seed, self.num_elements).product(piece, start)

    # ------------------------------------------------------------ finished sums

    @in_round
    def install(self, parts: Sequence[Packed]) -> tuple[bytes, float]:
        """Take over a sum that others have finished, all of it or none."""
        sizes = [math.prod(packed.shape) for packed in parts]
        if sum(sizes) != self.num_elements:
            raise BadMessage(RejectCode.BAD_SHAPE, "parts do not cover the sum", sizes=sizes[:16])
        decoded = []
        for packed, size in zip(parts, sizes, strict=True):
            decoded.append(self._decoded(packed, size))
        # Everything was decoded before the buffer is touched: all parts, or none.
        self._open()
        start = 0
        for piece in decoded:
            self._sum.place(start, piece.numel()).copy_(piece)
            self._sum.written(start, piece.numel())
            start += piece.numel()
        return self._sealed()

    @in_round
    def unpack(self, packed: Packed) -> Packed:
        """Decoded: elements as they are in memory."""
        return codecs.encode(self._plain, self._decoded(packed, math.prod(packed.shape)))

    @property
    def travel_bytes(self) -> float:
        """Of sums of integers as measured; else as much as a reduced piece may take."""
        if self._fixed_point:
            return (_SMALL_BYTES if self.codec.reduced == self._lossless else _INT64_BYTES) * self.num_elements
        return float(codecs.find(self.codec.usual).sizes(self.num_elements)[1])

    @in_round
    def finished_sum(self, start: int, stop: int) -> Packed:
        """Elements [start, stop) of the sum buffer, bit by bit: as a reduced piece, if that loses nothing more."""
        check_part(start, stop, self.num_elements)
        piece = self._sum.flat[start:stop].clone()  # a Packed may view its tensor
        again = None if self._fixed_point else self.codec.again(piece, start)
        return again or codecs.encode(self._lossless, piece)

    def apply(self, commits: Sequence[Commit]) -> None:
        """One optimizer step on the finished sum: `state` is a version further."""
        self.state.apply(self.flat, commits)
        mine = commits[self.canonical.stage]
        self.codec.applied(mine.id, voids=self.forgotten)
        self._turn()
        if self._reducer.needs_center:  # for the next step's reducer: this one's mean per microbatch
            if self._center is None:
                self._center = torch.empty(self.num_elements, dtype=torch.float32)
            self._center.copy_(self._sum.flat).div_(self._num_microbatches - len(mine.voided))
            self._center_version = self.state.version

    def changed(self) -> None:
        """The state is another: no sum of mine leads on from it."""
        self._version = self._center_version = -1
        self._turn()

    # ------------------------------------------------------------ inside

    @property
    def forgotten(self) -> int:  # type: ignore[override]
        """How often the codec must forget: each time that the accumulator of the then oldest step was revoked."""
        return self._before + self._accumulator.revoked - self._revoked_then

    def _frozen(self) -> Tensor:
        """The accumulator, as it was when the round began."""
        total = self._accumulator.read(self.state.version)
        if self._voids not in (None, self._accumulator.voids):
            raise Refused(RejectCode.NOT_READY, "the sum was voided in the round", step=self.state.version)
        return total

    def _turn(self) -> None:
        """Another step is the oldest open one."""
        self._before = self.forgotten
        self._accumulator = self._accumulators[self.state.version % len(self._accumulators)]
        self._revoked_then = self._accumulator.revoked
        self._voids = None

    def _sealed(self) -> tuple[bytes, float]:
        digest, square = self._sum.seal(), self.state.square_norm(self._sum.flat)
        # Nobody could apply it, so nobody may sign it.
        if not square < LARGEST_NORM:
            raise Refused(RejectCode.VOID, "the sum's norm is not finite", stage=self.canonical.stage)
        self._version = self.state.version
        return digest, square

    def _decoded(self, packed: Packed, size: int) -> Tensor:
        """A piece of a finished sum."""
        check_codec(packed, self.codec.reduced, self._lossless, self._plain)
        decoded = codecs.decode(packed, expect_shape=(size,))
        if self._fixed_point:
            self._check_range(largest_magnitude([decoded]))
        return decoded

    def _check_range(self, largest: float) -> None:
        check_fixed_point(largest, most=self.state.most(self._num_microbatches))


def check_part(start: int, stop: int, end: int) -> None:
    """Raises BadMessage unless [start, stop) lies in [0, end)."""
    if not 0 <= start <= stop <= end:
        raise BadMessage(RejectCode.BAD_SHAPE, "no such part", start=start, stop=stop, num_elements=end)
