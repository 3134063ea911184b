"""A stage on the ranks of a mesh: `stage.backend` by orders to rank processes and memory that they share with this one.

In this process: what crosses to ranks and back (one microbatch at a time, so one buffer for inputs and one for
outputs), the flat sum of a round, the finished sum, and the copies of the state (`ranks.host_copies`). On the ranks:
modules, saved activations, sums and moments (`ranks.stage`). Ranks keep what a forward has saved until its weight pass,
until its step is applied, or until its handle here is gone: then the next order has them drop it.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swarmnet.errors import Refused, RejectCode
from swarmnet.manifest.schema import StageSpec
from swarmnet.ranks.host_copies import COPIES, PASTS, SUMS, HostCopies, copied
from swarmnet.ranks.layout import MeshLayout, MeshSplit
from swarmnet.ranks.memory import Place
from swarmnet.ranks.program import PAST
from swarmnet.ranks.supervisor import RankGroup, RankSupervisor, RestartBackoff
from swarmnet.stage.accumulator import GradientSum, SumContent, sum_dtype
from swarmnet.stage.canonical import Canonical, Initial
from swarmnet.stage.passes import MemoryPolicy
from swarmnet.stage.rounding import num_scales
from swarmnet.stage.state import PastSteps, PastWeights, State
from swarmnet.telemetry.kinds import OnEvent

PROGRAM = "swarmnet.ranks.program:Program"


class Held:
    """What ranks hold under `key`: saved activations of a microbatch, or a share."""

    def __init__(self, key: int) -> None:
        self.key, self.went_back = key, False


class MeshBackend:
    """`stage.backend.StageBackend` on the ranks of `layout`. They are started by `start`, or when first needed.

    memory: how each rank spends its own. Raises UsageError if these ranks cannot share the stage.
    """

    device, apart = torch.device("cpu"), True

    def __init__(
        self,
        spec: StageSpec,
        layout: MeshLayout,
        *,
        initial: Initial | None = None,
        memory: MemoryPolicy | None = None,
        backoff: RestartBackoff | None = None,
        base: Path | None = None,
    ) -> None:
        memory, backoff = memory or MemoryPolicy(), backoff or RestartBackoff()
        # Raises what is wrong with that, before anything is made.
        MeshSplit(spec, layout)
        canonical, training = Canonical.of(spec), spec.training
        self.writes_at_once = memory.writes_at_once
        self._layout, self._spec = layout, spec
        batch, length, late = training.microbatch_size, training.sequence_length, 1 + spec.averaging.delay.most
        activation, size = (batch, length, spec.model.hidden_size), canonical.num_elements
        numbers = num_scales(spec.averaging, canonical.shapes)
        places: dict[str, Place] = {
            "tokens": ((batch, length + 1), "int32"),
            **dict.fromkeys(("inward", "outward"), (activation, "float32")),
            **dict.fromkeys(SUMS, ((size,), str(sum_dtype(spec.numerics)).removeprefix("torch."))),
            **dict.fromkeys(COPIES, ((copied(canonical).num_bytes,), "uint8")),
            "scales": ((late, numbers), "float32"),
            **dict.fromkeys(PASTS, ((size + numbers,), "float32")),
        }
        self._group = RankGroup(
            PROGRAM,
            {
                "spec": spec.model_dump_json(),
                "layout": asdict(layout),
                "memory": asdict(memory),
                "base": str(base or ""),
            },
            devices=layout.devices,
            deadline_s=backoff.order_s,
            memory=places,
            # FSDP2 takes seconds to import: no restart should wait for it, and other meshes need none of it
            preload=("swarmnet.ranks.fully_sharded",) if layout.shard == "zero3" else (),
        )
        self._memory = self._group.memory.places
        self._ranks = RankSupervisor(
            self._group,
            self._lost,
            lambda *facts: self._on_event(*facts),
            label=layout.label,
            load=lambda: self._copies.load(),
            backoff=backoff,
        )
        scales = self._memory["scales"]
        self._copies = HostCopies(canonical, self._ranks, self._memory)
        self._reading = SumReading(self._memory["reading"])
        self.state = State(canonical, self._copies, scales, initial)
        self.sums = [RankSum(self._ranks, self._reading) for _ in range(late)]
        self.past = PastSteps(
            allot=lambda place: self._memory[PASTS[place]],
            read=lambda step: [*self._copies.weights_of(step), scales[step % late]],
        )
        self.watch(lambda: None, lambda event, fields: None)
        self._keys = itertools.count()

    # ------------------------------------------------------------ ranks

    def watch(self, lost: Callable[[], None], event: OnEvent) -> None:
        self._on_lost, self._on_event = lost, event

    def start(self) -> None:
        self._ranks.start()

    def close(self) -> None:
        self._ranks.close()

    def _lost(self) -> None:
        for total in self.sums:  # first: no thread may read what is not there
            total.lose()
        self._on_lost()

    # ------------------------------------------------------------ microbatches

    def forward(self, step: int, tokens: Tensor, hidden: Tensor | None, *, train: bool) -> tuple[Tensor, Held | None]:
        with self._ranks.lock:
            key = next(self._keys)
            self._write_input(tokens, hidden)
            answers = self._ranks.order("forward", finishes=not train, key=key, step=step, train=train)
            held = Held(key) if train else None
            if held is not None:
                weakref.finalize(held, self._ranks.forget, key).atexit = False
            return self._read_output(answers), held

    def _write_input(self, tokens: Tensor, hidden: Tensor | None) -> None:
        self._memory["tokens"].copy_(tokens)  # ranks read it in the order that follows; the lock keeps others from it
        if hidden is not None:
            self._memory["inward"].copy_(hidden)

    def _read_output(self, answers: Sequence[Mapping[str, Any]]) -> Tensor:
        if not self._spec.last:  # cloned: the next microbatch overwrites it
            return self._memory["outward"].clone()
        # tensor ranks agree on a loss, data ranks have one of their rows each; summed in the order of ranks
        losses = [answers[self._layout.rank(d, 0)]["loss"] for d in range(self._layout.data)]
        return torch.tensor(losses, dtype=torch.float32).sum()

    def backward(self, work: object, gradient: Tensor | None) -> Tensor | None:
        assert isinstance(work, Held)
        # Ranks would find nothing saved: say it here, where the caller is.
        if work.went_back:
            raise ValueError("backward of this pass has run already")
        with self._ranks.lock:
            if gradient is not None:
                self._memory["inward"].copy_(gradient)
            work.went_back = True
            self._ranks.order("backward", key=work.key)
            return None if self._spec.first else self._memory["outward"].clone()

    def accumulate(self, work: object, *, step: int, index: int, discards: int) -> bool:
        assert isinstance(work, Held)
        if not work.went_back:
            raise ValueError(f"no gradient to add: microbatch {step}/{index}")

        at: dict[str, Any] = {"step": step, "index": index, "discards": discards}
        try:
            return self.sums[step % len(self.sums)].count(
                lambda: self._ranks.order("accumulate", finishes=True, key=work.key, **at), **at
            )
        except Refused:  # the ranks are gone, and what was summed
            return False
        finally:
            self._ranks.forget(work.key)

    def sum_memory(self) -> Tensor:
        return self._memory["finished"]

    # ------------------------------------------------------------ steps that are over

    def new_share(self) -> Held:
        key = next(self._keys)
        self._ranks.order("new_share", spare=True, key=key)
        return Held(key)

    def recompute(
        self,
        weights: PastWeights,
        index: int,
        tokens: Tensor,
        hidden: Tensor | None,
        gradient: Tensor | None,
        share: Held | None,
    ) -> tuple[Tensor, Tensor | None]:
        def once() -> tuple[Tensor, Tensor | None]:
            with self._ranks.lock:
                self._write_input(tokens, hidden)
                # Each rank reads all its input before it enters the first collective, and its rows are written after
                # the last: so the gradient comes in where the output goes, and the answer goes where the input was.
                if gradient is not None:
                    self._memory["outward"].copy_(gradient)
                past: dict[str, Any] = {"step": weights.step, "weights": PASTS[weights.place], "number": weights.number}
                key = None if share is None else share.key
                answers = self._ranks.order("again", spare=True, finishes=True, share=key, index=index, **past)
                return self._read_output(answers), None if self._spec.first else self._memory["inward"].clone()

        try:
            return once()
        except Refused:
            # A share is lost with its ranks. A single microbatch is not: the next ranks can compute it.
            if share is not None:
                raise
        return once()

    def read_share(self, share: Held, step: int) -> Tensor:
        with self._ranks.lock:
            # Free until the next update, and larger than any sum.
            name, memory = self._copies.scratch
            self._ranks.order("write_share", spare=True, share=share.key, step=step, into=name)
            return memory[: self.sum_memory().nbytes].view(self.sum_memory().dtype).clone()

    def end_recomputing(self) -> None:
        self._ranks.forget(PAST)


# ---------------------------------------------------------------- sums of open steps


class SumReading:
    """The flat memory that sums are written to, and the content that it holds now."""

    def __init__(self, flat: Tensor) -> None:
        self.flat = flat
        self.holds: SumContent | None = None
        self.lock = threading.Lock()


class RankSum(GradientSum):
    """A sum that ranks hold; those that are up write it to `reading`'s memory.

    Locks are taken in this order: the sum's, that of `reading`, the ranks'. So reading a sum that is written already
    waits for no order.
    """

    def __init__(self, ranks: RankSupervisor, reading: SumReading) -> None:
        super().__init__(threading.RLock())
        self._ranks, self._reading = ranks, reading

    def _read(self, content: SumContent) -> Tensor:
        with self._reading.lock:
            # A round reads a sum in many pieces: it is written once.
            if self._reading.holds != content:
                self._reading.holds = None  # half written if ranks are lost meanwhile
                if content.indexes:
                    self._ranks.order("write_sum", step=content.step, discards=content.discards)
                    # Others may have come up before that, which do not have this sum.
                    if content.discards != self.discards:
                        raise Refused(RejectCode.NOT_READY, "the sum was lost or discarded", step=content.step)
                else:  # nothing was added: no rank need be asked, nor be up
                    self._reading.flat.zero_()
                self._reading.holds = content
            return self._reading.flat
