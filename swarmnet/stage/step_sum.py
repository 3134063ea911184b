"""From a replica's accumulator to the finished sum of its stage, piece by piece: the arithmetic of an averaging round.

What it contributes and reduces goes through the run's codec and reducer; what comes back is put together and digested.
Knows rounds by their ids only, and no peers but as names of contributions. Compute thread only, but for `phases`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from swarmnet.config.plug_in import split
from swarmnet.errors import BadMessage, Refused, RejectCode
from swarmnet.ids import RoundId
from swarmnet.manifest.codec_names import rank
from swarmnet.manifest.schema import Manifest
from swarmnet.messages import Commit, Packed
from swarmnet.stage import snapshot
from swarmnet.stage.accumulator import check_fixed_point
from swarmnet.stage.backend import GradientSum, State
from swarmnet.stage.canonical import Canonical
from swarmnet.stage.engine import Contribution, Reduced
from swarmnet.stage.factor_codec import FactorCodec
from swarmnet.stage.reducer import PartReducer
from swarmnet.stage.sum_buffer import SumBuffer
from swarmnet.stage.sum_codec import SumCodec
from swarmnet.wire import codecs


class StepSum:
    """The sums of one stage, always of the version that `state` is at: of the oldest open step.

    accumulators: step s sums in accumulators[s % len]. memory: where the finished sum is put together. What a codec
    remembers is void with the accumulator of the step that is being averaged; a void of a step that has contributed
    nothing yet leaves it, and so does a loss: ranks that died never held it.

    Positions count through all `phases`, the vectors that a round sums one after the other; for most codecs there is
    one, the flat gradient itself. Raises BadMessage for what a peer sent, Refused(VOID) for a result of our own that is
    not finite.
    """

    def __init__(
        self, manifest: Manifest, state: State, accumulators: Sequence[GradientSum], *, memory: Tensor
    ) -> None:
        self._state, self._canonical, self._accumulators = state, state.canonical, accumulators
        self._accumulator = accumulators[0]  # of the oldest open step
        self._revoked_then = self._forgotten_before = 0
        self._voids: int | None = None  # of the accumulator, as the round began that I take part in
        self._fixed_point = manifest.numerics.mode == "deterministic"
        self._num_microbatches = manifest.training.microbatches
        self._sum = SumBuffer.over(memory)
        self._version = -1  # the version the finished sum leads on from
        self._codec = codec_of(manifest.averaging.codec, self._canonical, memory.device)
        self._arriving = self._codec.buffer(self._sum)
        self._reducer = PartReducer(manifest)
        self._center: Tensor | None = None  # what the last step's mean was, where the reducer asks for it
        self._center_version = -1  # the version it led to

    @property
    def phases(self) -> tuple[int, ...]:
        """Lengths of the vectors that a round sums."""
        return self._codec.phases

    @property
    def private_phases(self) -> int:
        """All of them are summed by everybody."""
        return 0

    @property
    def sum_elements(self) -> int:
        """Length of the finished sum."""
        return self._canonical.num_elements

    @property
    def block(self) -> int:
        return self._codec.block

    @property
    def flat(self) -> Tensor:
        """The finished sum. Raises ValueError if there is none of this version."""
        if self._version != self._state.version:
            raise ValueError(f"no finished sum of version {self._state.version} is installed")
        return self._sum.flat

    # ------------------------------------------------------------ taking part in a round

    def begin(self, round_id: RoundId, *, resent: bool = False, kept: Collection[tuple[int, int, int]] = ()) -> None:
        """What is contributed and reduced from now on is so in that round; and what stands of the last one."""
        self._voids = self._accumulator.voids
        self._codec.begin(round_id, voids=self._forgotten, resent=resent, kept=kept)

    def contribution(self, start: int, stop: int) -> Packed:
        """Positions [start, stop) of the accumulator under the averaging codec.

        Raises Refused(NOT_READY) if that was voided since the round began: another piece of it has perhaps been sent,
        and of the same sum all are, or the codec would remember the wrong rest.
        """
        check_part(start, stop, sum(self.phases))
        total = self._accumulator.read(self._state.version)
        if self._voids not in (None, self._accumulator.voids):
            raise Refused(RejectCode.NOT_READY, "the sum was voided in the round", step=self._state.version)
        with blameless(self._canonical.stage):
            return self._codec.contribution(total, start, stop, voids=self._forgotten)

    def reduce(self, contributions: Sequence[Contribution], start: int, stop: int, *, hop: int = 0) -> Reduced:
        """Reduce contributions in the order given, on the CPU: they come from the network and return to it."""
        center = None
        if self._center is not None and self._center_version == self._state.version:
            center = self._center[start:stop]
        total, clipped = self._reducer(contributions, stop - start, center, hop=hop)
        with blameless(self._canonical.stage):
            return Reduced(self._codec.sum(total, start, voids=self._forgotten, hop=hop), clipped)

    def open(self) -> None:
        """Another sum comes: what was there is gone."""
        self._sum.open()
        self._arriving.open()
        self._version = -1

    def put(self, start: int, packed: Packed) -> None:
        """Decode a reduced piece, its first element at position `start`."""
        check_codec(packed, self._codec.reduced)
        size = codecs.num_elements(packed.shape)
        place = self._arriving.place(start, size)
        codecs.decode_into(place, packed)
        self._check_range(place)
        self._arriving.written(start, size)

    def next_phase(self) -> None:
        """A vector was put whole, and another is to be summed."""
        with blameless(self._canonical.stage):
            self._codec.next_phase(voids=self._forgotten)

    def seal(self) -> tuple[bytes, float]:
        """Everything was put: the digest of the whole sum and its squared norm."""
        with blameless(self._canonical.stage, only=RejectCode.NON_FINITE):
            self._codec.finish(self._sum)
        return self._sealed()

    # ------------------------------------------------------------ finished sums

    def install(self, parts: Sequence[Packed]) -> tuple[bytes, float]:
        """Take over a sum that others have finished, all of it or none."""
        sizes = [math.prod(packed.shape) for packed in parts]
        if sum(sizes) != self._canonical.num_elements:
            raise BadMessage(RejectCode.BAD_SHAPE, "parts do not cover the sum", sizes=sizes[:16])
        decoded = []
        for packed, size in zip(parts, sizes, strict=True):
            check_codec(packed, self._codec.reduced, self._lossless)
            decoded.append(codecs.decode(packed, expect_shape=(size,)))
            self._check_range(decoded[-1])
        self.open()
        start = 0
        for piece in decoded:
            self._sum.place(start, piece.numel()).copy_(piece)
            self._sum.written(start, piece.numel())
            start += piece.numel()
        return self._sealed()

    def finished(self, start: int, stop: int) -> Packed:
        """Elements [start, stop) of the sum buffer, losslessly."""
        check_part(start, stop, self._canonical.num_elements)
        return codecs.encode(self._lossless, self._sum.flat[start:stop].clone())  # a Packed may view its tensor

    def apply(self, commits: Sequence[Commit]) -> None:
        """One optimizer step on the finished sum: `state` is a version further."""
        self._state.apply(self.flat, commits)
        mine = commits[self._canonical.stage]
        self._codec.applied(mine.id, voids=self._forgotten)
        self._turn()
        if self._reducer.needs_center:  # for the next step's reducer: this one's mean per microbatch
            if self._center is None:
                self._center = torch.empty(self._canonical.num_elements, dtype=torch.float32)
            self._center.copy_(self._sum.flat).div_(self._num_microbatches - len(mine.voided))
            self._center_version = self._state.version

    def changed(self) -> None:
        """The state is another: no sum of mine leads on from it."""
        self._version = self._center_version = -1
        self._turn()

    # ------------------------------------------------------------ what only this replica knows

    def memory(self) -> dict[str, Tensor]:
        """Copies of what the codec remembers of earlier steps, by name; {}: this codec remembers nothing.

        It belongs to this replica, so it is no part of the stage's state, which all replicas hold and hand on alike.
        """
        return {name: tensor.to("cpu", copy=True) for name, tensor in self._codec.memory.items()}

    def recall(self, data: bytes | memoryview) -> None:
        """Go on from what `memory` gave at this version, packed like a snapshot.

        Raises BadMessage, and remembers what it did before."""
        shapes = {name: tensor.shape for name, tensor in self._codec.memory.items()}
        saved = snapshot.unpack(data, shapes, stage=self._canonical.stage, version=self._state.version)
        self._codec.recall(saved, voids=self._forgotten)

    # ------------------------------------------------------------ inside

    @property
    def _forgotten(self) -> int:
        """How often the codec is to forget: the oldest step was revoked since it is that, and those before it while
        they were."""
        return self._forgotten_before + self._accumulator.revoked - self._revoked_then

    def _turn(self) -> None:
        """Another step is the oldest open one."""
        self._forgotten_before = self._forgotten
        self._accumulator = self._accumulators[self._state.version % len(self._accumulators)]
        self._revoked_then = self._accumulator.revoked
        self._voids = None

    @property
    def _lossless(self) -> str:
        return "int64" if self._fixed_point else "fp32"

    def _sealed(self) -> tuple[bytes, float]:
        digest = self._sum.seal()
        self._version = self._state.version
        return digest, self._canonical.square_norm(self._sum.flat)

    def _check_range(self, piece: Tensor) -> None:
        if self._fixed_point:  # in fp32 mode decoding has checked enough
            check_fixed_point(piece)


@contextlib.contextmanager
def blameless(stage: int, *, only: RejectCode | None = None) -> Iterator[None]:
    """Encoding what we computed ourselves: if it is refused, nobody is to blame, and it is void."""
    try:
        yield
    except BadMessage as error:
        if only not in (None, error.code):
            raise
        raise Refused(RejectCode.VOID, "our own result is not finite", stage=stage) from error


def check_part(start: int, stop: int, end: int) -> None:
    """Raises BadMessage unless [start, stop) lies in [0, end)."""
    if not 0 <= start <= stop <= end:
        raise BadMessage(RejectCode.BAD_SHAPE, "no such part", start=start, stop=stop, num_elements=end)


def codec_of(name: str, canonical: Canonical, device: torch.device) -> SumCodec | FactorCodec:
    """How vectors over all elements of this stage travel under that averaging codec."""
    family, parameter = split(name)
    if family == "powersgd":
        return FactorCodec(rank(parameter), canonical.parameter_shapes, device=device)
    return SumCodec(name, canonical.parameter_shapes, canonical.num_elements, device=device)


def check_codec(packed: Packed, *allowed: str) -> None:
    """Raises BadMessage if it travels as anything else."""
    if packed.codec not in allowed:
        raise BadMessage(RejectCode.MALFORMED, "not the run's codec", found=packed.codec[:32], expected=allowed)
