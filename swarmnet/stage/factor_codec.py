"""A sum under `powersgd:R`: matrices as factors, in two phases, with error feedback. Same shape as `stage.sum_codec`.

Positions run through both phases: the first vector's elements, then the second's. Pieces of both are plain fp32. Knows
no rounds but their ids and no peers. Compute thread only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from swarmnet.ids import RoundId
from swarmnet.messages import Packed
from swarmnet.stage.codec_choice import Parameter
from swarmnet.stage.feedback import RESIDUAL, Feedback
from swarmnet.stage.low_rank import LowRank
from swarmnet.stage.sum_buffer import SumBuffer
from swarmnet.wire import codecs

DIRECTIONS = "averaging.directions"
"""Name of PowerSGD's Q where a replica saves it."""


class FactorCodec:
    """`phases`: lengths of the vectors that a round sums, one after the other."""

    contributed = reduced = "fp32"
    block = 1

    def __init__(self, rank: int, parameters: Sequence[Parameter], *, device: torch.device) -> None:
        self.low_rank, self._device = LowRank(rank, parameters), device
        self.phases = tuple(size for size in self.low_rank.sizes if size)  # without large matrices there is one
        self.feedback = Feedback(self.low_rank.num_elements, device=device)
        self._sums = SumBuffer(sum(self.phases), dtype=torch.float32, device=torch.device("cpu"))
        self._corrected: Tensor | None = None  # what I want to send; None: nobody has asked for it
        self._mine: list[Tensor] = []  # my vector of each phase so far
        self._basis: list[Tensor] = []
        self._finished: RoundId | None = None
        self._round: RoundId | None = None

    def begin(
        self, round_id: RoundId, *, voids: int, resent: bool = False, kept: Collection[tuple[int, int, int]] = ()
    ) -> None:
        """A round begins, at its first phase. Only where there is no second may anything of the last one stand; nothing
        is owed then."""
        self.feedback.begin(round_id, voids=voids)
        self._round, self._finished = round_id, None
        self._corrected, self._mine, self._basis = None, [], []

    def contribution(self, total: Tensor, start: int, stop: int, *, voids: int) -> Packed:
        """Positions [start, stop) of what I send of the accumulator `total` and of what is still owed."""
        if self._corrected is None:
            self.feedback.at(voids)
            self._corrected = self.feedback.corrected(total.to(self._device), 0)
            self._mine = [self.low_rank.first(self._corrected.cpu())]
        edge = self.phases[0]
        vector, shift = (self._mine[0], 0) if start < edge or not self._basis else (self._mine[1], edge)
        return codecs.encode("fp32", vector[start - shift : stop - shift].clone())

    def sum(self, total: Tensor, start: int, *, voids: int, hop: int = 0) -> Packed:
        """A reduced piece. Raises NON_FINITE."""
        return codecs.encode("fp32", total)

    def buffer(self, whole: SumBuffer) -> SumBuffer:
        """Where reduced pieces are put: not into the sum itself, which they are not yet."""
        return self._sums

    def next_phase(self, *, voids: int) -> None:
        """The first sum is whole: what it says is where to look, and what I send of it is settled."""
        first = self._sums.flat[: self.phases[0]]
        self._basis = self.low_rank.basis(first)
        if self._corrected is None:
            return
        corrected = self._corrected.cpu()
        self._mine.append(self.low_rank.second(corrected, self._basis))
        sent = torch.empty_like(corrected)
        self.low_rank.whole(self._mine[0], self._basis, self._mine[1], sent)
        self.feedback.at(voids)
        self.feedback.contributed(self._corrected, sent.to(self._corrected.device), 0)

    def finish(self, whole: SumBuffer) -> None:
        """Both sums are whole: write what they stand for. Raises NON_FINITE."""
        self._sums.seal()
        first, second = self._sums.flat[: self.phases[0]], self._sums.flat[self.phases[0] :]
        out = torch.empty(self.low_rank.num_elements)
        self.low_rank.whole(first, self._basis, second, out)
        codecs.check_finite(out)
        whole.open()
        whole.place(0, out.numel()).copy_(out)
        whole.written(0, out.numel())
        self._finished = self._round

    @property
    def memory(self) -> dict[str, Tensor]:
        """What the codec remembers from step to step, by name."""
        return {RESIDUAL: self.feedback.residual, DIRECTIONS: self.low_rank.directions}

    def recall(self, memory: Mapping[str, Tensor], *, voids: int) -> None:
        """Go on from a saved `memory`. Raises BadMessage; the residual is then as it was."""
        self.low_rank.take_over(memory[DIRECTIONS])
        self.feedback.take_over(memory[RESIDUAL], voids=voids)

    def applied(self, round_id: RoundId | None, *, voids: int) -> None:
        """The sum of that round has been applied, made here or fetched; None: the step has ended without one."""
        self.feedback.at(voids)
        self.feedback.applied(round_id)
        if round_id is not None and round_id == self._finished:
            self.low_rank.learn(self._sums.flat[self.phases[0] :])
        self._corrected, self._mine, self._basis, self._finished = None, [], [], None
