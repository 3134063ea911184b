"""From a replica's accumulator to the finished aggregate of its stage, piece by piece: the arithmetic of an averaging
round with `averaging.sync` "exact" and "overlap". Everything here is integers: what a replica contributes, what a
reducer makes of contributions, and the aggregate have exactly one value each, in any order and grouping.

Knows rounds by their ids only, and no peers but as names of contributions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch import Tensor

from swarmnet.bounds import LARGEST_NORM
from swarmnet.engine.compute_thread import StageJobs
from swarmnet.engine.payloads import check_codec
from swarmnet.engine.torch_engine import StageSums
from swarmnet.errors import BadMessage, Refused, RejectCode
from swarmnet.ids import RoundId
from swarmnet.messages import Commit, Packed
from swarmnet.pledge import whole_of
from swarmnet.stage.accumulator import GradientSum, check_fixed_point
from swarmnet.stage.interfaces import Contribution, Reduced
from swarmnet.stage.state import State
from swarmnet.sums import linear
from swarmnet.sums.reducer import INTEGERS, integer_sum
from swarmnet.sums.sum_buffer import SumBuffer
from swarmnet.wire import codecs
from swarmnet.wire.codec import num_elements

_BYTES = {"small": 0.7, "int64": 4.0}
"""Of an element, about: of the small grid, and of the fine one."""

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
    """What the sums of a stage have in common, whatever a round sums: the state they lead on from."""

    def __init__(self, jobs: StageJobs, state: State) -> None:
        self.jobs, self.state, self.canonical = jobs, state, state.canonical

    @property
    def num_elements(self) -> int:
        return self.canonical.num_elements


class StepSum(RoundSum):
    """The sums of one stage, always of the version that `state` is at: of the oldest open step.

    accumulators: step s sums in accumulators[s % len]. memory: where the finished sum is put together. Raises
    BadMessage for what a peer sent.
    """

    def __init__(self, jobs: StageJobs, state: State, accumulators: Sequence[GradientSum], *, memory: Tensor) -> None:
        super().__init__(jobs, state)
        self._num_microbatches = state.canonical.spec.training.microbatches
        self._accumulators = accumulators
        self._discards: int | None = None  # of the accumulator, as the round began that I take part in
        self._said: Packed | None = None  # the last piece that I contributed
        self._sum = SumBuffer(memory)
        self._version = -1  # the version the finished sum leads on from

    @property
    def element_bytes(self) -> float:
        return _BYTES[self.canonical.spec.averaging.codec]

    @property
    def flat(self) -> Tensor:
        """The finished sum. Raises ValueError if there is none of this version."""
        if self._version != self.state.version:
            raise ValueError(f"no finished sum of version {self.state.version} is installed")
        return self._sum.flat

    # ------------------------------------------------------------ taking part in a round

    @in_round
    def open_round(self, round_id: RoundId) -> None:
        """Open that round: contributions are of the accumulator as it is now."""
        self._discards = self._accumulator.discards

    @in_round
    def contribution(self, start: int, stop: int, reference: bytes = b"") -> Packed:
        """Positions [start, stop) of the accumulator.

        Raises Refused(NOT_READY) if the accumulator was discarded since the round began: another piece may have been
        sent already, and all pieces must be of one sum.
        """
        check_part(start, stop, self.num_elements)
        self._said = codecs.encode(INTEGERS, self._frozen()[start:stop])
        return self._said

    @in_round
    def reduce(self, contributions: Sequence[Contribution], start: int, stop: int, *, hop: int = 0) -> Reduced:
        """Add contributions, on the CPU: they come from the network and return to it."""
        # There is no other contribution, and integers have one encoding: the sum of this piece is the piece itself.
        if len(contributions) == 1 and contributions[0].packed is self._said:
            return Reduced(self._said)
        total = integer_sum(contributions, stop - start, most=self.state.most)
        return Reduced(codecs.encode(INTEGERS, total))

    @in_round
    def open_sum(self) -> None:
        """Empty the sum buffer for another sum."""
        self._sum.open()
        self._version = -1

    @in_round
    def put(self, start: int, packed: Packed) -> None:
        """Decode a piece into the sum buffer, its first element at position `start`."""
        check_codec(packed, INTEGERS)
        size = num_elements(packed.shape)
        slot = self._sum.slot(start, size)
        largest = codecs.decode_integers(slot, packed, add=False)
        check_fixed_point(largest, most=self.state.most(self._num_microbatches))
        self._sum.written(start, size)

    @in_round
    def seal(self) -> tuple[bytes, float]:
        """The digest of the whole sum, once every piece was put, and its squared norm."""
        digest, square = self._sum.seal(), self.state.square_norm(self._sum.flat)
        # No replica could apply it, so none may sign it.
        if not square < LARGEST_NORM:
            raise Refused(RejectCode.OVERFLOWED, "the sum's norm is not finite", stage=self.canonical.stage)
        self._version = self.state.version
        return digest, square

    # ------------------------------------------------------------ the check of reducers

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
            check_codec(packed, INTEGERS)
            piece = codecs.decode(packed, expect_shape=(stop - start,))
        return linear.drawn(seed, self.num_elements).product(piece, start)

    def stands_for(self, contribution: Tensor, seed: bytes) -> bytes:
        """Of its product."""
        return whole_of(linear.drawn(seed, self.num_elements).product(contribution))

    # ------------------------------------------------------------ finished sums

    @in_round
    def finished_sum(self, start: int, stop: int) -> Packed:
        """Positions [start, stop) of the sum buffer."""
        check_part(start, stop, self.num_elements)
        return codecs.encode(INTEGERS, self._sum.flat[start:stop])

    def apply(self, commits: Sequence[Commit]) -> None:
        """One optimizer step on the finished sum: `state` is a version further."""
        self.state.apply(self.flat, commits)
        self._discards = None

    def changed(self) -> None:
        """The state is another: no sum of mine leads on from it."""
        self._version, self._discards = -1, None

    # ------------------------------------------------------------ inside

    @property
    def _accumulator(self) -> GradientSum:
        """Of the oldest open step."""
        return self._accumulators[self.state.version % len(self._accumulators)]

    def _frozen(self) -> Tensor:
        """The accumulator, as it was when the round began."""
        total = self._accumulator.read(self.state.version)
        if self._discards not in (None, self._accumulator.discards):
            raise Refused(RejectCode.NOT_READY, "the sum was discarded in the round", step=self.state.version)
        return total


def check_part(start: int, stop: int, end: int) -> None:
    """Raises BadMessage unless [start, stop) is within [0, end)."""
    if not 0 <= start <= stop <= end:
        raise BadMessage(RejectCode.BAD_SHAPE, "no such part", start=start, stop=stop, num_elements=end)
