"""What a rank does with orders of `ranks.backend`: the rank's part of a stage, fed from and written to shared memory.

Runs in a rank process (`ranks.process`). Shapes, checks and what an order means to the protocol are the peer process's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from swarmnet.errors import Refused, RejectCode
from swarmnet.manifest.schema import StageSpec
from swarmnet.ranks.host_copies import copied
from swarmnet.ranks.layout import MeshLayout, MeshSplit
from swarmnet.ranks.process import RankContext
from swarmnet.ranks.stage import RankStage
from swarmnet.stage.accumulator import Accumulator
from swarmnet.stage.passes import ForwardPass, MemoryPolicy
from swarmnet.stage.state import PastWeights

Answer = Mapping[str, Any] | None

T = TypeVar("T")

PAST = -1
"""The key of what this rank holds to compute past microbatches again."""


class Program:
    """The handler of a rank's orders. An order is a public method, its fields are the arguments; what it returns is the
    answer."""

    def __init__(self, context: RankContext) -> None:
        settings = context.settings
        self._spec, layout = StageSpec.model_validate_json(settings["spec"]), MeshLayout(**settings["layout"])
        self._context = context
        _, t = layout.coordinates(context.rank)
        grid = [[layout.rank(d, column) for column in range(layout.tensor)] for d in range(layout.data)]
        self._stage = RankStage(
            self._spec,
            layout,
            tensor=context.new_group(grid),
            data=context.new_group([*zip(*grid, strict=True)]),
            device=context.device,
            memory=MemoryPolicy(**settings["memory"]),
            scales=context.memory["scales"],
            base=Path(settings["base"]) if settings["base"] else None,
        )
        self._writes_output = t == 0  # it is the same on all tensor ranks
        rows = MeshSplit(self._spec, layout).rows(context.rank)
        self._rows = slice(rows.start, rows.stop)
        self._layout = copied(self._stage.canonical)
        self._works: dict[int, tuple[int, ForwardPass]] = {}  # by the key of the order, with their steps
        self._shares: dict[int, Accumulator] = {}

    def __call__(self, name: str, fields: Mapping[str, Any]) -> Answer:
        arguments = dict(fields)
        # First: what is to come may need its memory.
        for key in arguments.pop("forgotten"):
            self._works.pop(key, None)
            if key == PAST:
                self._shares.clear()
                self._stage.end_recomputing()
        answer: Answer = getattr(self, name)(**arguments)
        return answer

    def load(self, version: int, copy: str) -> None:
        # What was computed on other weights is worth nothing.
        self._works.clear()
        self._shares.clear()
        self._stage.end_recomputing()
        self._stage.read_state(version, self._copy(copy))

    def forward(self, key: int, step: int, train: bool) -> Answer:
        hidden = None if self._spec.first else self._read("inward")
        output, work = self._stage.forward(step, self._read("tokens"), hidden, train=train)
        if work is not None:
            self._works[key] = step, work
        return self._output(output)

    def backward(self, key: int) -> None:
        own = self._stage.backward(_held(self._works, key)[1], None if self._spec.last else self._read("inward"))
        if own is not None:
            self._write("outward", own)

    def accumulate(self, key: int, step: int, index: int, discards: int) -> None:
        work = _held(self._works, key)[1]
        del self._works[key]
        self._stage.sum_of(step).follow(discards)
        self._stage.accumulate(work, step=step, index=index, discards=discards)

    def write_sum(self, step: int, discards: int) -> None:
        self._stage.sum_of(step).follow(discards)
        self._stage.write_sum(step, self._context.memory["reading"])

    def update(self, version: int, total: str, scale: float, rate: float, copy: str) -> None:
        self._stage.update(version, self._context.memory[total], scale=scale, rate=rate)
        # What is still here of steps that are applied now was given up.
        self._works = {key: (step, work) for key, (step, work) in self._works.items() if step > version}
        self._stage.write_state(version + 1, self._copy(copy))

    def new_share(self, key: int) -> None:
        self._shares[key] = self._stage.new_share()

    def again(self, weights: str, number: int, step: int, index: int, share: int | None) -> Answer:
        """A microbatch of a step that is over."""
        tokens, hidden = self._read("tokens"), None if self._spec.first else self._read("inward")
        gradient = None if self._spec.last else self._read("outward")
        kept = PastWeights(step, number, 0, self._context.memory[weights])
        total = None if share is None else _held(self._shares, share)
        output, own = self._stage.recompute(kept, index, tokens, hidden, gradient, total)
        if own is not None:
            self._write("inward", own)
        return self._output(output)

    def write_share(self, step: int, into: str, share: int) -> None:
        like = self._context.memory["reading"]
        total = self._context.memory[into][: like.nbytes].view(like.dtype)
        self._stage.write_sum(step, total, _held(self._shares, share))

    # ------------------------------------------------------------ shared memory

    def _copy(self, name: str) -> dict[str, Tensor]:
        return self._layout.views(self._context.memory[name])

    def _output(self, output: Tensor) -> Answer:
        if self._spec.last:
            return {"loss": output.item()}
        self._write("outward", output)
        return None

    def _write(self, name: str, rows: Tensor) -> None:
        if self._writes_output:
            self._context.memory[name][self._rows].copy_(rows)

    def _read(self, name: str) -> Tensor:
        """This rank's own copy of its rows: the next microbatch overwrites the buffer before the weight pass."""
        return self._context.memory[name][self._rows].to(self._context.device, copy=True)


def _held(table: Mapping[int, T], key: int) -> T:
    """What this rank holds under that key. Raises Refused on all ranks alike: those that held it were lost."""
    if key not in table:
        raise Refused(RejectCode.NOT_READY, "the ranks that held what this needs were lost", key=key)
    return table[key]
