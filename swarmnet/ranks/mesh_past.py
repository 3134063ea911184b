"""Microbatches of the last steps again, on the ranks of a mesh: `stage.backend.Past` by orders.

Weights of past steps are in memory of the peer process that ranks map, so they outlive ranks: a microbatch whose ranks
die is computed again by the next ones. What was added to a share dies with them, and the share is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from swarmnet.errors import DeviceFull, Refused
from swarmnet.ranks.host_state import HostState, StageState
from swarmnet.ranks.kept import KeptSteps
from swarmnet.ranks.restarts import Ranks
from swarmnet.stage.accumulator import sum_dtype
from swarmnet.stage.backend import PastShare

_MOST_LOST = 4
"""So often in a row ranks may be lost in audits, which are refused from then on: once more and the peer would be given
up (`RestartBackoff.restarts`), though it can train."""

_LASTS = 1 << 62
"""The step of what no applied step ends (`Ranks.holds`)."""


class MeshPast:
    """The last steps of a stage on `ranks`.

    Args:
        scales: as of `StageState`.
        places, allot: ids of shared memory by name, and what makes more of it.
        bring, fetch: a microbatch's input to ranks, and its output from their answers; under the ranks' lock.
        keys: of what ranks hold.
    """

    def __init__(
        self,
        state: StageState,
        holder: HostState,
        ranks: Ranks,
        scales: Tensor,
        *,
        places: Mapping[str, int],
        allot: Callable[[str, tuple[int, ...], torch.dtype], Tensor],
        bring: Callable[[Tensor, Tensor | None], None],
        fetch: Callable[[Sequence[Mapping[str, Any]]], Tensor],
        keys: Iterator[int],
    ) -> None:
        self._state, self._holder, self._ranks, self._scales = state, holder, ranks, scales
        self._places, self._allot, self._bring, self._fetch, self._keys = places, allot, bring, fetch, keys
        self._steps = KeptSteps[str](self._memory)
        self._tensors: dict[str, Tensor] = {}  # that were allotted, by name
        self._key: int | None = None  # of what ranks hold for this
        self._lost = 0  # how often in a row ranks were lost in an order of this

    @property
    def kept_bytes(self) -> int:
        """Of host memory."""
        elements = self._state.canonical.num_elements
        return sum(self._tensors[name][:elements].nbytes for name in self._steps.taken)

    def keep(self, steps: int) -> None:
        self._steps.keep(steps)

    def note(self, step: int) -> None:
        name = self._steps.room(step)
        if name is None:
            return
        kept, start = self._tensors[name], 0
        for weight in self._holder.weights_of(step):
            kept[start : start + weight.numel()].copy_(weight.view(-1))
            start += weight.numel()
        kept[start:].copy_(self._scales[step % len(self._scales)])

    def forget(self) -> None:
        self._steps.forget()

    def holds(self, step: int) -> bool:
        return self._lost < _MOST_LOST and self._steps.get(step) is not None

    def again(
        self,
        step: int,
        index: int,
        tokens: Tensor,
        hidden: Tensor | None,
        gradient: Tensor | None,
        share: PastShare | None,
    ) -> tuple[Tensor, Tensor | None]:
        try:
            return self._once(step, index, tokens, hidden, gradient, share)
        except Refused:
            # A share is gone with its ranks. A single microbatch is not: the next ranks can compute it.
            if share is not None:
                raise
        return self._once(step, index, tokens, hidden, gradient, None)

    def share(self, step: int) -> PastShare:
        return PastShare(step, next(self._keys), life=self._ranks.life)

    def read(self, share: PastShare) -> Tensor:
        with self._ranks.lock:
            # Free until the next update, and larger than any sum.
            name, memory = self._holder.scratch(self._state.version)
            self._order("write_share", share, step=share.step, into=name)
            spec, size = self._state.canonical.spec, self._state.canonical.num_elements
            dtype = sum_dtype(spec.numerics)
            return memory[: size * dtype.itemsize].view(dtype).clone()

    def release(self) -> None:
        key, self._key = self._key, None
        if key is not None:
            self._ranks.forget(key)

    def _once(
        self,
        step: int,
        index: int,
        tokens: Tensor,
        hidden: Tensor | None,
        gradient: Tensor | None,
        share: PastShare | None,
    ) -> tuple[Tensor, Tensor | None]:
        spec, kept = self._state.canonical.spec, self._steps.get(step)
        assert kept is not None, step
        shape = spec.training.microbatch_size, spec.training.sequence_length, spec.model.hidden_size
        with self._ranks.lock:
            self._bring(tokens, hidden)
            # Apart from where input and output are: a rank may be done before another has read.
            if gradient is not None:
                self._shared("past_gradient", shape).copy_(gradient)
            answer = None if spec.first else self._shared("past_answer", shape)
            number, weights = kept
            answers = self._order("again", share, step=step, index=index, weights=weights, number=number)
            self._ranks.finished()
            if share is not None:
                share.lengths += sum(each["length"] for each in answers)
            return self._fetch(answers), None if answer is None else answer.clone()

    def _order(self, name: str, share: PastShare | None, **fields: Any) -> list[Mapping[str, Any]]:
        if self._key is None:
            self._key = next(self._keys)
        life, number = (None, None) if share is None else (share.life, share.number)
        key, more = self._key, {"places": dict(self._places), "share": number}
        before = self._ranks.life
        try:
            answers = self._ranks.order(name, life=life, key=key, **more, **fields)
            self._lost = 0
            return answers
        except (Refused, DeviceFull):
            self._lost += self._ranks.life != before
            raise
        finally:
            # Also where all ranks have refused it: they hold the module.
            self._ranks.holds[key] = _LASTS

    def _shared(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._tensors:
            self._tensors[name] = self._allot(name, shape, torch.float32)
        return self._tensors[name]

    def _memory(self) -> str:
        name, canonical = f"past{len(self._steps.taken)}", self._state.canonical
        self._shared(name, (canonical.num_elements + self._scales.shape[-1],))
        return name
