"""How sums of gradients travel in this run: under which codec, and with what memory of what was lost.

Stands between the accumulator, which is flat and whole, and a `Packed`, which is one piece under one codec. When the
manifest says `auto`, the codec of a tensor follows from what it is and how large. Matrices are nearly all of the bytes
and bear rounding well; norms and biases are few, scale whole layers, and are sent as they are. So is a matrix too small
to be worth a thought. A function of names and shapes alone: every replica chooses alike. Knows no rounds but their ids
and no peers. Averaging thread only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from swarmnet.config.plug_in import split
from swarmnet.ids import RoundId
from swarmnet.manifest.codec_names import auto_matrices, travels_as
from swarmnet.messages import Packed
from swarmnet.sums.feedback import RESIDUAL, Feedback
from swarmnet.sums.sum_buffer import SumBuffer
from swarmnet.wire import codecs

SMALL = 4096
"""Elements below which a tensor travels in fp32. Also keeps runs few: see `wire.codec_mixed`."""

EXACT = "fp32"

Parameter = tuple[str, tuple[int, ...]]
"""(name, shape)"""


def choose(name: str, shape: Sequence[int], *, matrices: str) -> str:
    """The codec of one tensor; `matrices` for large matrices, which are not a norm's or a bias's by name either."""
    vector = len(shape) < 2 or name.endswith(".bias") or "norm" in name.rpartition(".")[0].rpartition(".")[2]
    return EXACT if vector or math.prod(shape) < SMALL else matrices


def runs(
    parameters: Sequence[Parameter], start: int, stop: int, *, matrices: str, block: int = 1
) -> list[tuple[str, int]]:
    """(codec, number of elements) along elements [start, stop) of the flat gradient; none is empty.

    parameters: all of the stage's, in canonical order. block: of the codec of matrices. What travels under it is cut
    once more at the first multiple of `block`, from where its blocks are the same wherever a piece begins.
    """
    pieces: list[tuple[str, int]] = []
    edge = 0
    for name, shape in parameters:
        begin, edge = edge, edge + math.prod(shape)
        size = min(edge, stop) - max(begin, start)
        if size > 0:
            pieces.append((choose(name, shape, matrices=matrices), size))
    found: list[tuple[str, int]] = []
    for codec, group in itertools.groupby(pieces, key=lambda piece: piece[0]):
        size = sum(size for _, size in group)
        before = min(size, -start % block) if codec == matrices else 0
        found += [(codec, each) for each in (before, size - before) if each]
        start += size
    return found


class SumCodec:
    """contributed, reduced: the codecs that a contribution and a reduced piece carry by name. block: see Engine.

    codec: `averaging.codec` of the manifest. parameters: all of the stage's, in canonical order. device: where what is
    owed is kept. Raises UsageError if no installed distribution brings the codec.
    """

    def __init__(self, codec: str, parameters: Sequence[Parameter], num_elements: int, *, device: torch.device) -> None:
        self.contributed = travels_as(codec)
        found = codecs.use(self.contributed)
        self.reduced = found.reduced
        family, parameter = split(codec)
        self._matrices = auto_matrices(parameter) if family == "auto" else None
        self._parameters, self._device = tuple(parameters), device
        self.phases = (num_elements,)  # one vector is summed: the flat gradient
        coarse = found.feedback or (self._matrices is not None and codecs.find(self._matrices).feedback)
        self.usual = self._matrices or self.reduced  # under which most of a sum travels
        self.block = codecs.find(self._matrices).block if self._matrices is not None else found.block
        self._loses_twice = self._matrices is not None or codecs.find(self.reduced).feedback
        self.feedback = Feedback(num_elements, device=device) if coarse else None

    def begin(
        self, round_id: RoundId, *, voids: int, resent: bool = False, kept: Collection[tuple[int, int, int]] = ()
    ) -> None:
        """A round begins: what is encoded from now on belongs to it, and what stands of the last one."""
        if self.feedback is not None:
            self.feedback.begin(round_id, voids=voids, resent=resent, kept=kept)

    def contribution(self, total: Tensor, start: int, stop: int, *, voids: int) -> Packed:
        """Elements [start, stop) of the accumulator `total`, and what is still owed of them. Raises NON_FINITE."""
        piece = total[start:stop]
        # Encoded where the accumulator is: from a GPU the encoding alone comes over.
        if self.feedback is None:
            return self._encode(self.contributed, piece, start, apart=True)  # the accumulator moves on
        self.feedback.at(voids)
        corrected = self.feedback.corrected(piece.to(self._device), start)
        packed = self._encode(self.contributed, corrected, start)
        # What others decode is what was sent.
        self.feedback.contributed(corrected, codecs.decode(packed, device=corrected.device), start)
        return packed

    def sum(self, total: Tensor, start: int, *, voids: int, hop: int = 0) -> Packed:
        """A piece reduced in that hop, on the CPU; do not change `total` afterwards. Raises NON_FINITE."""
        packed = self._encode(self.reduced, total, start)
        # The reducer owes what encoding its sum has lost.
        if self.feedback is not None and self._loses_twice:
            self.feedback.at(voids)
            self.feedback.reduced(total, codecs.decode(packed), start, hop=hop)
        return packed

    def again(self, piece: Tensor, start: int) -> Packed | None:
        """A piece of a finished sum as it was reduced; None if it does not decode to the same bits."""
        if self.reduced == EXACT:
            return None
        packed = self._encode(self.reduced, piece, start)
        same = torch.equal(codecs.decode(packed).view(torch.int32), piece.view(torch.int32))
        return packed if same else None

    def buffer(self, whole: SumBuffer) -> SumBuffer:
        """Where reduced pieces are put: into the sum itself."""
        return whole

    def next_phase(self, *, voids: int) -> None:
        """There is none."""
        raise ValueError("a round under this codec has one phase")

    def finish(self, whole: SumBuffer) -> None:
        """What was put is the sum."""

    @property
    def memory(self) -> dict[str, Tensor]:
        """What the codec remembers from step to step, by name; live tensors."""
        return {} if self.feedback is None else {RESIDUAL: self.feedback.residual}

    def recall(self, memory: Mapping[str, Tensor], *, voids: int) -> None:
        """Go on from a saved `memory`. Raises BadMessage; unchanged then."""
        if self.feedback is not None:
            self.feedback.take_over(memory[RESIDUAL], voids=voids)

    def applied(self, round_id: RoundId | None, *, voids: int) -> None:
        """The sum of that round has been applied; None: the step has ended without one."""
        if self.feedback is not None:
            self.feedback.at(voids)
            self.feedback.applied(round_id)

    def _encode(self, codec: str, piece: Tensor, start: int, *, apart: bool = False) -> Packed:
        if self._matrices is None:
            return codecs.encode(codec, piece, apart=apart)
        return codecs.encode_runs(self._runs(start, piece.numel()), piece)

    def _runs(self, start: int, size: int) -> list[tuple[str, int]]:
        assert self._matrices is not None
        return runs(self._parameters, start, start + size, matrices=self._matrices, block=self.block)
