"""The outer optimizer of `sync = "local"`: outer weights, their momentum, and the step that replicas take together.

A replica trains on its own and from time to time averages with others. Its *pseudo-gradient* is the difference of its
outer weights, those it had after the outer step before, and its weights. With `partners = "all"` the mean
pseudo-gradient of all replicas moves the outer weights by one step of Nesterov momentum, and the weights continue from
there (DiLoCo, arXiv:2311.08105): outer weights are equal in all replicas. With `"pairs"` only two replicas exchange,
and outer weights differ; a mixing term towards the partner's, inside the momentum, keeps them together (NoLoCo,
arXiv:2506.10911).

The difference of random weights and the first useful ones is long and points in no lasting direction: as a momentum it
would throw the outer weights past their target for many outer steps. So early outer steps are *plain*: the outer
weights become the mean of the weights, and there is no momentum yet.

Everything is elementwise on flat fp32 vectors, so any range of elements can be exchanged at any time
(`sums.local_sum`). Knows no rounds, no codecs and no peers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from swarmnet.manifest.schema import Averaging
from swarmnet.stage import snapshot
from swarmnet.stage.rounding import chunk_elements


class Outer:
    """Outer weights and outer momentum of one replica, separate from its live weights `parameters` (in canonical
    order).

    gossip: of how many replicas a mean is; 0: of all. learning_rate, momentum: of the outer step. Positions count
    through all parameters, one after the other.
    """

    def __init__(self, parameters: Sequence[Tensor], *, gossip: int = 0, learning_rate: float, momentum: float) -> None:
        self.follow(parameters)
        self._edges = [0, *itertools.accumulate(parameter.numel() for parameter in self._parameters)]
        self._pull = pull(momentum, gossip) if gossip else 0.0
        self.steps = 0  # how often the weights were moved here
        self._rate, self._decay = learning_rate, momentum
        device = self._parameters[0].device
        self.slow = torch.empty(self._edges[-1], dtype=torch.float32, device=device)
        self.momentum = torch.empty_like(self.slow)
        self.reset()

    @classmethod
    def of(cls, averaging: Averaging, parameters: Sequence[Tensor]) -> Outer | None:
        """The run's outer optimizer; None if it has none."""
        if averaging.sync != "local":
            return None
        return cls(
            parameters,
            gossip=averaging.gossip,
            learning_rate=averaging.outer_learning_rate,
            momentum=averaging.outer_momentum,
        )

    def follow(self, parameters: Sequence[Tensor]) -> None:
        """The live weights are in this memory now."""
        self._parameters = [parameter.detach() for parameter in parameters]

    def reset(self) -> None:
        """Begin here: the slow weights are the weights, and nothing has moved."""
        for start, weights in self._pieces(0, self.slow.numel()):
            self.slow[start : start + weights.numel()] = weights
        self.momentum.zero_()

    def vector(self, start: int, stop: int, *, plain: bool = False) -> Tensor:
        """What this replica gives to the mean that it asks for: fp32 [stop - start], fresh memory."""
        out = torch.empty(stop - start, dtype=torch.float32, device=self.slow.device)
        for at, weights in self._pieces(start, stop):
            slow, piece = self.slow[at : at + weights.numel()], out[at - start : at - start + weights.numel()]
            torch.sub(slow, weights, out=piece)
            # A plain step between partners takes the mean of the weights themselves.
            if self._pull and plain:
                piece.copy_(weights)
            elif self._pull:
                # The partner's slow weights pull, see `gossip_step`.
                piece.mul_(-self._rate / self._pull).add_(slow)
        return out

    def step(
        self, mean: Tensor, start: int, *, mine: bool = True, unsent: Tensor | None = None, plain: bool = False
    ) -> float:
        """Move the slow weights from `start` on by the mean of all `vector`s, and the weights with them.

        mine: my vector is in that mean. Then the weights become the slow weights; else they move as the slow weights
        do, and what I have learned on top of them is mine to bring another time. unsent: the difference between my
        vector and what the mean has of it. It stays in the weights, so my next vector contains it. plain: as the
        vectors were. Returns how far the weights moved, as a part of their length.
        """
        self.steps += 1
        moved = length = 0.0
        for at, weights in self._pieces(start, start + mean.numel()):
            here = slice(at, at + weights.numel())
            slow, momentum = self.slow[here], self.momentum[here]
            # To measure how far the weights move.
            before = weights.clone()
            # Keep what I learned beyond the slow weights: it is added to the moved ones below.
            if not mine:
                weights.sub_(slow)
            towards = mean[at - start : here.stop - start].to(slow.device)
            if plain:
                slow.copy_(towards) if self._pull else slow.sub_(towards)
                # Early steps lead nowhere further, so they leave no momentum.
                momentum.zero_()
            elif self._pull:
                gossip_step(slow, momentum, towards, decay=self._decay, strength=self._pull)
            else:
                nesterov_step(slow, momentum, towards, learning_rate=self._rate, decay=self._decay)
            # What I brought is in the slow weights now; else my way stays on top of them.
            weights.copy_(slow) if mine else weights.add_(slow)
            if unsent is not None:
                weights.sub_(unsent[at - start : here.stop - start].to(weights.device))
            moved += _square(before.sub_(weights))
            length += _square(weights)
        return math.sqrt(moved / length) if length else 0.0

    def tensors(self, names: Sequence[str]) -> dict[str, Tensor]:
        """The live state by the names it has in a snapshot. names: of the parameters, in order."""
        found: dict[str, Tensor] = {}
        for name, parameter, (start, stop) in zip(
            names, self._parameters, itertools.pairwise(self._edges), strict=True
        ):
            found[snapshot.slow_name(name)] = self.slow[start:stop].view(parameter.shape)
            found[snapshot.outer_momentum_name(name)] = self.momentum[start:stop].view(parameter.shape)
        return found

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """(position, flat view) of every piece of a parameter inside [start, stop): little enough at once that what is
        computed on the way takes little, too."""
        size = chunk_elements(self.slow.device)
        for parameter, (first, last) in zip(self._parameters, itertools.pairwise(self._edges), strict=True):
            low, high = max(start, first), min(stop, last)
            # A chunk at a time: what is computed on the way takes little memory.
            for at in range(low, high, size):
                yield at, parameter.view(-1)[at - first : min(at + size, high) - first]


def nesterov_step(slow: Tensor, momentum: Tensor, mean: Tensor, *, learning_rate: float, decay: float) -> None:
    """In place: momentum = decay * momentum + mean; slow -= learning_rate * (mean + decay * momentum)."""
    momentum.mul_(decay).add_(mean)
    slow.sub_(mean, alpha=learning_rate).sub_(momentum, alpha=learning_rate * decay)


def gossip_step(slow: Tensor, momentum: Tensor, mean: Tensor, *, decay: float, strength: float) -> None:
    """In place: momentum = decay * momentum + strength * (mean - slow); slow += momentum.

    mean: of slow - learning_rate / strength * (slow - weights) over the partners. strength: of the mixing. Over all
    replicas the mixing terms cancel: where partners have equal weight, the mean of all outer weights moves as if all
    had averaged with all.
    """
    momentum.mul_(decay).add_(mean, alpha=strength).sub_(slow, alpha=strength)
    slow.add_(momentum)


def pull(decay: float, size: int) -> float:
    """How strongly the members of groups of `size` are drawn together: the middle of the interval in which, by the
    paper's analysis, slow weights stay together under this momentum; for pairs inside that for three, too."""
    return math.sqrt(size / (2 * (size - 1))) * (decay + math.sqrt(2 + decay * decay)) / 2


def _square(flat: Tensor) -> float:
    return float(torch.linalg.vector_norm(flat, dtype=torch.float64).item()) ** 2
