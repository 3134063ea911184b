"""What a rank does with orders of `ranks.backend`: the rank's part of a stage, fed from and written to shared memory.

Runs in a rank process (`ranks.process`). Shapes, checks and what an order means to the protocol are the peer process's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from swarmnet.manifest.schema import Manifest
from swarmnet.ranks.host_state import mirrored
from swarmnet.ranks.layout import MeshLayout, MeshSplit
from swarmnet.ranks.process import Handler, RankContext
from swarmnet.ranks.stage import RankStage
from swarmnet.stage.accumulator import sum_dtype
from swarmnet.stage.canonical import Canonical
from swarmnet.stage.passes import MemoryPolicy

Fields = Mapping[str, Any]


def handler(context: RankContext) -> Handler:
    """The handler of this rank's orders."""
    return _Program(context)


class _Program:
    def __init__(self, context: RankContext) -> None:
        settings = context.settings
        manifest, layout = Manifest.model_validate_json(settings["manifest"]), MeshLayout.of(settings["layout"])
        self._context, self._manifest = context, manifest
        _, t = layout.coordinates(context.rank)
        along_tensor = [[layout.rank(row, column) for column in range(layout.tensor)] for row in range(layout.data)]
        along_data = [[layout.rank(row, column) for row in range(layout.data)] for column in range(layout.tensor)]
        self._stage = RankStage(
            manifest,
            settings["stage"],
            layout,
            context.rank,
            tensor=context.new_group(along_tensor),
            data=context.new_group(along_data),
            device=context.device,
            memory=MemoryPolicy(**settings["memory"]),
        )
        self._speaks = t == 0  # what leaves is the same on all tensor ranks
        self._rows = MeshSplit(
            manifest.model, layout, manifest.training.microbatch_size, manifest.training.sequence_length
        ).rows(context.rank)
        self._canonical = Canonical.of(manifest, settings["stage"])
        self._layout = mirrored(self._canonical)
        self._first, self._last = settings["stage"] == 0, settings["stage"] == manifest.cut.stages - 1
        self._places: Mapping[str, int] = {}

    def __call__(self, name: str, fields: Fields) -> Mapping[str, Any] | None:
        self._stage.drop(fields["forgotten"])  # first: what is to come may need its memory
        match name:
            case "load":
                self._places = fields["places"]
                self._stage.read_state(fields["version"], self._mirror(fields["version"]))
            case "forward":
                return self._forward(**{key: fields[key] for key in ("key", "step", "train")})
            case "backward":
                self._backward(fields["key"])
            case "accumulate":
                self._stage.accumulate(fields["key"], step=fields["step"], index=fields["index"], voids=fields["voids"])
            case "write_sum":
                self._stage.write_sum(fields["step"], fields["voids"], self._sum("reading"))
            case "update":
                version = fields["version"]
                self._stage.update(version, self._sum(fields["total"]), scale=fields["scale"], rate=fields["rate"])
                self._stage.write_state(version + 1, self._mirror(version + 1))
            case _:
                raise ValueError(f"no such order: {name}")
        return None

    def _forward(self, key: int, step: int, train: bool) -> Mapping[str, Any] | None:
        tokens = self._activations("tokens", torch.int32)
        hidden = None if self._first else self._activations("inward", torch.float32)
        output = self._stage.forward(key, step, tokens, hidden, train=train)
        if self._last:
            return {"loss": output.item()}
        self._answer(output)
        return None

    def _backward(self, key: int) -> None:
        gradient = None if self._last else self._activations("inward", torch.float32)
        own = self._stage.backward(key, gradient)
        if own is not None:
            self._answer(own)

    def _answer(self, rows: Tensor) -> None:
        if self._speaks:  # one rank of those that have these rows writes them
            self._activations("outward", torch.float32).copy_(rows)

    def _activations(self, name: str, dtype: torch.dtype) -> Tensor:
        """This rank's rows of a microbatch's tensor."""
        whole = self._memory(name).view(dtype).view(self._manifest.training.microbatch_size, -1)
        rows = whole[self._rows.start : self._rows.stop]
        if name == "tokens":
            return rows
        return rows.view(len(self._rows), self._manifest.training.sequence_length, -1)

    def _sum(self, name: str) -> Tensor:
        return self._memory(name).view(sum_dtype(self._manifest.numerics))

    def _mirror(self, version: int) -> dict[str, Tensor]:
        return self._layout.views(self._memory(f"mirror{version % 2}"))

    def _memory(self, name: str) -> Tensor:
        return self._context.memory(self._places[name])
