"""A stage on the ranks of a mesh: `stage.backend` by orders to rank processes and memory that they share with this one.

In this process: what crosses to ranks and back (one microbatch at a time, so one place for what goes in and one for
what comes out), the flat sum of a round, the finished sum, and two copies of the state (`ranks.host_state`). On the
ranks: modules, stashes, sums and moments (`ranks.stage`). Ranks keep a stash until its weight pass, or until nobody
here holds what it is called by: however work ends, the next order has them drop it.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from swarmnet.errors import DeviceFull, Refused
from swarmnet.manifest.schema import StageSpec
from swarmnet.ranks.group import RankGroup
from swarmnet.ranks.host_state import HostState, RankSum, StageState, SumReading, mirror_name, mirrored
from swarmnet.ranks.layout import MeshLayout, MeshSplit
from swarmnet.ranks.mesh_past import MeshPast
from swarmnet.ranks.restarts import Ranks, RestartBackoff
from swarmnet.stage.accumulator import sum_dtype
from swarmnet.stage.backend import OnEvent
from swarmnet.stage.canonical import Canonical, Initial
from swarmnet.stage.passes import MemoryPolicy
from swarmnet.stage.rounding import num_scales

PROGRAM = "swarmnet.ranks.program:handler"


class Held:
    """A microbatch whose stash ranks hold. life: of those ranks."""

    def __init__(self, key: int, life: int) -> None:
        self.key, self.life, self.went_back = key, life, False


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
    ) -> None:
        memory, backoff = memory or MemoryPolicy(), backoff or RestartBackoff()
        # Raises what is wrong with that, before anything is made.
        MeshSplit.of(spec, layout)
        canonical, training = Canonical.of(spec), spec.training
        self.writes_at_once = memory.writes_at_once
        self._layout, self._spec = layout, spec
        settings = {"spec": spec.model_dump_json(), "layout": asdict(layout), "memory": asdict(memory)}
        self._group = RankGroup(
            PROGRAM,
            settings,
            devices=layout.devices,
            deadline_s=backoff.order_s,
            # FSDP2 takes seconds to import: no restart should wait for it, and other meshes need none of it
            preload=("swarmnet.ranks.fully_sharded",) if layout.shard == "zero3" else (),
        )
        self._places: dict[str, int] = {}
        batch, length = training.microbatch_size, training.sequence_length
        dtype = sum_dtype(spec.numerics)
        self._tokens = self._share("tokens", (batch, length + 1), torch.int32)
        self._inward = self._share("inward", (batch, length, spec.model.hidden_size), torch.float32)
        self._outward = self._share("outward", (batch, length, spec.model.hidden_size), torch.float32)
        self._finished = self._share("finished", (canonical.num_elements,), dtype)
        self._reading = SumReading(self._share("reading", (canonical.num_elements,), dtype))
        size = mirrored(canonical).num_bytes
        mirrors = [self._share(mirror_name(number), (size,), torch.uint8) for number in range(2)]
        self._ranks = Ranks(
            self._group,
            self._lost,
            lambda *facts: self._on_event(*facts),
            label=layout.label,
            load=self._standing,
            backoff=backoff,
        )
        holder = HostState(canonical, mirrors, update=self._update, wait=self._settle, changed=self._ranks.reload)
        late = 1 + spec.averaging.delay.most
        rows = late, num_scales(spec.averaging, canonical.shapes)
        self._scales, self._scales_then = (self._share(name, rows, torch.float32) for name in ("scales", "scales_then"))
        self._unsettled: dict[str, Any] = {}  # the last update, until ranks have written what it made
        self.state = StageState(canonical, holder, self._scales, initial)
        self.sums = [RankSum(self._ranks, self._reading, self._write_sum) for _ in range(late)]
        self.watch(lambda: None, lambda event, fields: None)
        self._keys = itertools.count()
        self.past = MeshPast(
            self.state,
            holder,
            self._ranks,
            self._scales,
            places=self._places,
            allot=self._share,
            bring=self._bring,
            fetch=self._fetch,
            keys=self._keys,
        )

    def _share(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = torch.Size(shape).numel()
        shared = self._group.share(size * dtype.itemsize)
        self._places[name] = shared.id
        return shared.bytes.view(dtype).view(shape)

    # ------------------------------------------------------------ ranks

    def watch(self, lost: Callable[[], None], event: OnEvent) -> None:
        self._on_lost, self._on_event = lost, event

    def start(self) -> None:
        self._ranks.start()
        with contextlib.suppress(Refused, DeviceFull):  # whoever asks next finds them lost
            self._settle(wait=False)

    def close(self) -> None:
        self._ranks.close()

    def _lost(self) -> None:
        for total in self.sums:  # first: nobody may read what is not there
            total.lose()
        self._on_lost()

    def _standing(self) -> list[tuple[str, Mapping[str, Any]]]:
        # The mirror of what the last update made is not whole: its sum still leads there.
        if update := self._unsettled:
            load = {"version": update["version"], "places": self._places, "scales": "scales_then"}
            return [("load", load), ("update", update | {"scales": "scales"})]
        return [("load", {"version": self.state.version, "places": self._places, "scales": "scales"})]

    # ------------------------------------------------------------ microbatches

    def forward(self, step: int, tokens: Tensor, hidden: Tensor | None, *, train: bool) -> tuple[Tensor, Held | None]:
        with self._ranks.lock:
            key = next(self._keys)
            self._bring(tokens, hidden)
            answers = self._ranks.order("forward", key=key, step=step, train=train)
            held = self._hold(key, step) if train else None
            if held is None:
                self._ranks.finished()
            return self._fetch(answers), held

    def _bring(self, tokens: Tensor, hidden: Tensor | None) -> None:
        self._tokens.copy_(tokens)  # ranks read it in the order that follows; the lock keeps others from it
        if hidden is not None:
            self._inward.copy_(hidden)

    def _fetch(self, answers: Sequence[Mapping[str, Any]]) -> Tensor:
        if not self._spec.last:  # cloned: the next microbatch comes out at the same place
            return self._outward.clone()
        # tensor ranks agree on a loss, data ranks have one of their rows each; summed in the order of ranks
        losses = [answers[self._layout.rank(d, 0)]["loss"] for d in range(self._layout.data)]
        return torch.tensor(losses, dtype=torch.float32).sum()

    def _hold(self, key: int, step: int) -> Held:
        """What ranks hold now is dropped there when nobody holds this any more."""
        held = Held(key, self._ranks.life)
        self._ranks.holds[key] = step
        weakref.finalize(held, self._ranks.forget, key).atexit = False
        return held

    def backward(self, work: object, gradient: Tensor | None) -> Tensor | None:
        assert isinstance(work, Held)
        # Ranks would find no stash: say it here, where the caller is.
        if work.went_back:
            raise ValueError("backward of this pass has run already")
        with self._ranks.lock:
            if gradient is not None:
                self._inward.copy_(gradient)
            work.went_back = True
            self._ranks.order("backward", life=work.life, key=work.key)
            return None if self._spec.first else self._outward.clone()

    def accumulate(self, work: object, *, step: int, index: int, voids: int) -> bool:
        assert isinstance(work, Held)
        if not work.went_back:
            raise ValueError(f"no gradient to add: microbatch {step}/{index}")

        def add() -> None:
            self._ranks.order("accumulate", life=work.life, key=work.key, step=step, index=index, voids=voids)

        try:
            added = self.sums[step % len(self.sums)].add(add, step=step, index=index, voids=voids)
        except Refused:  # the ranks are gone, and what was summed
            return False
        finally:
            self._ranks.forget(work.key)
        if added:
            self._ranks.finished()
        return added

    # ------------------------------------------------------------ sums and versions

    def sum_memory(self) -> Tensor:
        return self._finished

    def _write_sum(self, step: int, voids: int) -> None:
        self._ranks.order("write_sum", life=self._ranks.life, step=step, voids=voids)

    def _update(self, version: int, total: Tensor, scale: float, rate: float) -> None:
        """Raises Refused(NOT_READY) if the ranks are given up."""
        found = [
            name
            for name, flat in (("finished", self._finished), ("reading", self._reading.flat))
            if flat.data_ptr() == total.data_ptr()
        ]
        if not found:  # ranks have no other memory of ours
            raise ValueError("a sum that ranks cannot read")
        with self._ranks.lock:
            # an update that a death broke off begins again: its finished sum and the old state are still here
            update = {"version": version, "total": found[0], "scale": scale, "rate": rate, "scales": ""}
            self._ranks.insist("update", **update)
            self._scales_then.copy_(self._scales)
            self._unsettled = update
            self._ranks.finished()
            self._ranks.forget_step(version)
            # A sum of this replica's own is written over without a word.
            if found[0] == "reading":
                self._settle()

    def _settle(self, *, wait: bool = True) -> None:
        """Have what the last update made written to its mirror; or only look whether it is.

        Raises Refused(NOT_READY) if the ranks are given up.
        """
        with self._ranks.lock:
            if not self._unsettled:
                return
            if wait:
                self._ranks.insist("settle", wait=True)
            elif not all(answer["written"] for answer in self._ranks.order("settle", wait=False)):
                return
            self._unsettled = {}
