"""What a rank does with orders of `ranks.backend`: the rank's part of a stage, fed from and written to shared memory.

Runs in a rank process (`ranks.process`). Shapes, checks and what an order means to the protocol are the peer process's.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from swarmnet.manifest.schema import StageSpec
from swarmnet.ranks.host_state import mirror_name, mirrored
from swarmnet.ranks.layout import MeshLayout, MeshSplit
from swarmnet.ranks.past import Recomputation, StepWeights
from swarmnet.ranks.process import Handler, RankContext
from swarmnet.ranks.stage import RankStage
from swarmnet.stage.accumulator import sum_dtype
from swarmnet.stage.passes import ForwardPass, MemoryPolicy

Fields = Mapping[str, Any]


def handler(context: RankContext) -> Handler:
    """The handler of this rank's orders."""
    return _Program(context)


class _Program:
    def __init__(self, context: RankContext) -> None:
        settings = context.settings
        self._spec, layout = StageSpec.model_validate_json(settings["spec"]), MeshLayout(**settings["layout"])
        self._context = context
        _, t = layout.coordinates(context.rank)
        along_tensor = [[layout.rank(row, column) for column in range(layout.tensor)] for row in range(layout.data)]
        along_data = [[layout.rank(row, column) for row in range(layout.data)] for column in range(layout.tensor)]
        self._stage = RankStage(
            self._spec,
            layout,
            context.rank,
            tensor=context.new_group(along_tensor),
            data=context.new_group(along_data),
            device=context.device,
            memory=MemoryPolicy(**settings["memory"]),
        )
        self._speaks = t == 0  # what leaves is the same on all tensor ranks
        self._rows = MeshSplit.of(self._spec, layout).rows(context.rank)
        self._layout = mirrored(self._stage.canonical)
        self._places: Mapping[str, int] = {}
        self._beside = ThreadPoolExecutor(1, "mirror", initializer=torch.set_num_threads, initargs=(1,))
        self._writing: Future[None] | None = None
        self._works: dict[int, ForwardPass] = {}  # microbatches in flight, by the key they were ordered under
        self._pasts: dict[int, Recomputation] = {}

    def __call__(self, name: str, fields: Fields) -> Mapping[str, Any] | None:
        # First: what is to come may need its memory.
        for key in fields["forgotten"]:
            self._works.pop(key, None)
            self._pasts.pop(key, None)
        match name:
            case "load":
                self._written()
                self._places = fields["places"]
                # What was computed on other weights is worth nothing.
                self._works.clear()
                self._pasts.clear()
                self._stage.round_by(self._memory(fields["scales"]).view(torch.float32))
                self._stage.read_state(fields["version"], self._mirror(fields["version"]))
            case "forward":
                return self._forward(**{key: fields[key] for key in ("key", "step", "train")})
            case "backward":
                gradient = None if self._spec.last else self._copied("inward", torch.float32)
                own = self._stage.backward(self._works[fields["key"]], gradient)
                if own is not None:
                    self._answer(own)
            case "accumulate":
                step, voids = fields["step"], fields["voids"]
                self._follow(step, voids)
                work = self._works.pop(fields["key"])
                self._stage.accumulate(work, step=step, index=fields["index"], voids=voids)
            case "again":
                return self._again(fields)
            case "write_share":
                self._places, step = fields["places"], fields["step"]
                bytes_ = sum_dtype(self._spec.numerics).itemsize * self._stage.canonical.num_elements
                total = self._memory(fields["into"])[:bytes_].view(sum_dtype(self._spec.numerics))
                self._stage.write_sum(step, total, self._past(fields["key"]).share(fields["share"]))
            case "write_sum":
                self._follow(fields["step"], fields["voids"])
                self._stage.write_sum(fields["step"], self._sum("reading"))
            case "update":
                version = fields["version"]
                self._written()
                self._stage.update(version, self._sum(fields["total"]), scale=fields["scale"], rate=fields["rate"])
                if fields["scales"]:
                    self._stage.round_by(self._memory(fields["scales"]).view(torch.float32))
                self._write(version + 1)
            case "settle":
                if fields["wait"] or (self._writing is not None and self._writing.done()):
                    self._written()
                return {"written": self._writing is None}
            case _:
                raise ValueError(f"no such order: {name}")
        return None

    def _write(self, version: int) -> None:
        """Have the state of `version` written to its mirror, beside the microbatches that follow."""
        device = self._context.device
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(device))

        def write() -> None:
            with torch.cuda.stream(stream):
                self._stage.write_state(version, self._mirror(version))

        self._writing = self._beside.submit(write)

    def _written(self) -> None:
        """Return once the state is in its mirror: nothing may change it before. Raises what the writing did."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def _forward(self, key: int, step: int, train: bool) -> Mapping[str, Any] | None:
        hidden = None if self._spec.first else self._copied("inward", torch.float32)
        output, work = self._stage.forward(step, self._copied("tokens", torch.int32), hidden, train=train)
        if work is not None:
            self._works[key] = work
        if self._spec.last:
            return {"loss": output.item()}
        self._answer(output)
        return None

    def _again(self, fields: Fields) -> Mapping[str, Any]:
        """A microbatch of a step that is over."""
        self._places, size = fields["places"], self._stage.canonical.num_elements
        kept = self._memory(fields["weights"]).view(torch.float32)
        hidden = None if self._spec.first else self._copied("inward", torch.float32)
        gradient = None if self._spec.last else self._copied("past_gradient", torch.float32)
        output, own, length = self._past(fields["key"]).run(
            StepWeights(fields["number"], kept[:size], kept[size:]),
            fields["step"],
            fields["index"],
            self._copied("tokens", torch.int32),
            hidden,
            gradient,
            fields["share"],
        )
        if own is not None:
            self._answer(own, "past_answer")
        if self._spec.last:
            return {"length": length, "loss": output.item()}
        self._answer(output)
        return {"length": length}

    def _past(self, key: int) -> Recomputation:
        """What computes that again, until the key is forgotten."""
        if key not in self._pasts:
            self._pasts[key] = Recomputation(self._stage)
        return self._pasts[key]

    def _follow(self, step: int, voids: int) -> None:
        """The peer process counts voids."""
        self._stage.sums[step % len(self._stage.sums)].follow(voids)

    def _answer(self, rows: Tensor, name: str = "outward") -> None:
        if self._speaks:  # one rank of those that have these rows writes them
            self._activations(name, torch.float32).copy_(rows)

    def _copied(self, name: str, dtype: torch.dtype) -> Tensor:
        """Ours to keep: the next microbatch comes in at the same place, before the weight pass."""
        return self._activations(name, dtype).to(self._context.device, copy=True)

    def _activations(self, name: str, dtype: torch.dtype) -> Tensor:
        """This rank's rows of a microbatch's tensor."""
        training = self._spec.training
        whole = self._memory(name).view(dtype).view(training.microbatch_size, -1)
        rows = whole[self._rows.start : self._rows.stop]
        return rows if name == "tokens" else rows.view(len(self._rows), training.sequence_length, -1)

    def _sum(self, name: str) -> Tensor:
        return self._memory(name).view(sum_dtype(self._spec.numerics))

    def _mirror(self, version: int) -> dict[str, Tensor]:
        return self._layout.views(self._memory(mirror_name(version)))

    def _memory(self, name: str) -> Tensor:
        return self._context.memory(self._places[name])
