"""What the peer process holds of a stage: its state, and what it knows of the sums of open steps on ranks.

`StageState` is the state of one rank in this process as of several: a holder has the tensors. A rank that is alone
(`ranks.stage`) is its own holder. Several ranks have `HostState`, the state that stays when all who compute it are
gone: two copies of weights and moments, whole and in canonical order, in memory that ranks share. Number version % 2 is
`version`, the other is where ranks write the next one: beside the microbatches that follow the update. Until all have
written it, the copy of the version before and the sum of the update stay, and ranks that are started meanwhile make the
update again. Snapshots and digests are read here; nowhere does one device have all of it.

Of the sum of an open step ranks hold the terms. Whose gradients were added, and which additions a void has overtaken,
is counted here. A sum that is lost with its ranks is refused until somebody has voided it: whoever takes part in a
round must not take zeros for what it counted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from swarmnet.errors import Refused, RejectCode
from swarmnet.messages import Commit
from swarmnet.ranks.restarts import Ranks
from swarmnet.stage import snapshot
from swarmnet.stage.canonical import Canonical, Initial
from swarmnet.stage.optimizer import MOMENTS
from swarmnet.stage.outer import Outer
from swarmnet.stage.rounding import Roundings


def mirrored(canonical: Canonical) -> snapshot.Layout:
    """Where each tensor lies in the memory of a mirror: in the peer process and on every rank alike."""
    outer = {*map(snapshot.slow_name, canonical.shapes), *map(snapshot.outer_momentum_name, canonical.shapes)}
    apart = outer | canonical.scale_shapes.keys()
    shapes = {name: shape for name, shape in canonical.state_shapes.items() if name not in apart}
    return snapshot.Layout(shapes, stage=canonical.stage)


def mirror_name(version: int) -> str:
    """The shared memory that holds `version`."""
    return f"mirror{version % 2}"


class StateHolder(Protocol):
    """Who has the tensors of a state: weights and moments, whole or as far as one rank has them."""

    def weights(self, version: int) -> list[Tensor]:
        """The live weights of `version`, in canonical order."""

    def update(self, version: int, total: Tensor, *, scale: float, rate: float) -> None:
        """From `version` to the next, with the flat sum `total` times `scale`."""

    def settle(self) -> None:
        """Return once nothing needs the sum of the last update any more."""

    def take(self, version: int) -> None:
        """The weights of `version` have changed where they rest, and not by an update."""

    def stay(self, version: int) -> None:
        """The version after `version` has the same weights and moments."""

    def reset(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Become version 0 with these whole weights, in canonical order."""

    def read_state(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Become `version`, whose whole state is in `tensors`, by the names of `stage.snapshot`."""

    def write_state(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Write the state of `version` over `tensors`."""


class StageState:
    """`stage.backend.State`: the version, and what leads on from it. The outer optimizer's tensors (`sync = "local"`)
    are here, and no holder's concern. scales: memory of `Roundings`, which the holder reads, too."""

    def __init__(
        self, canonical: Canonical, holder: StateHolder, scales: Tensor, initial: Initial | None = None
    ) -> None:
        self.canonical, self.version, self._holder, self._initial = canonical, 0, holder, initial
        spec = canonical.spec
        self._roundings = Roundings(
            spec.numerics, spec.averaging, canonical.shapes, terms=spec.training.microbatches, memory=scales
        )
        self.outer = Outer.of(canonical.spec.averaging, self.newest)
        self._outer_steps = 0  # that the holder knows of

    @property
    def newest(self) -> list[Tensor]:
        """The weights of `version`."""
        return self._holder.weights(self.version)

    def apply(self, total: Tensor, commits: Sequence[Commit], *, own_tokens: int | None = None) -> None:
        square = self.square_norm(total) if own_tokens is not None else 0.0
        update = self.canonical.update(self.version, commits, own_tokens=own_tokens, own_square=square)
        # An outer step has changed the weights.
        if self.outer is not None and self.outer.steps != self._outer_steps:
            self._outer_steps = self.outer.steps
            self._holder.take(self.version)
        # It may raise, and the version is what it was.
        self._holder.update(self.version, total, scale=update.scale, rate=update.rate)
        counted = self.canonical.spec.training.microbatches - len(commits[self.canonical.stage].voided)
        self._roundings.applied(self.version, self.canonical.pieces(total), counted=counted, clipped=update.clipped)
        self._become(self.version + 1)

    def settle(self) -> None:
        self._holder.settle()

    def most(self, num_microbatches: int) -> int:
        return self._roundings.of(self.version).most(num_microbatches)

    def square_norm(self, total: Tensor) -> float:
        return self.canonical.square_norm(total, self._roundings.of(self.version))

    def stay(self, commits: Sequence[Commit]) -> None:
        self.canonical.check(self.version, commits)
        self._roundings.stayed(self.version)
        self._become(self.version + 1)
        self._holder.stay(self.version - 1)

    def reset_to_seed(self) -> None:
        # Raises before anything has changed if the checkpoint is gone.
        weights = self.canonical.initial(self._initial)
        self._become(0)
        self._roundings.reset()
        self._holder.reset(weights)
        if self.outer is not None:
            self.outer.reset()

    def copy(self, memory: Tensor) -> int:
        places = self.canonical.layout.views(memory)
        self._holder.write_state(self.version, places)
        for name, tensor in self._own_tensors().items():
            places[name].copy_(tensor)
        return self.version

    def take_over(self, tensors: Mapping[str, Tensor], *, version: int) -> None:
        self._become(version)
        # The holder finds the scales when it is told to read.
        for name, tensor in self._roundings.tensors(version).items():
            tensor.copy_(tensors[name])
        self._roundings.changed()
        self._holder.read_state(version, tensors)
        for name, tensor in self._outer_tensors().items():
            tensor.copy_(tensors[name])

    def _become(self, version: int) -> None:
        self.version = version
        # The weights of another version may rest elsewhere.
        if self.outer is not None:
            self.outer.follow(self.newest)

    def _own_tensors(self) -> dict[str, Tensor]:
        return self._outer_tensors() | self._roundings.tensors(self.version)

    def _outer_tensors(self) -> dict[str, Tensor]:
        return {} if self.outer is None else self.outer.tensors(list(self.canonical.shapes))


class HostState:
    """The state of ranks in two mirrors. memory: of each, of `mirrored(canonical).num_bytes`.

    update: has ranks lead on from a version with (total, scale, rate), and then write the mirror of the next one. wait:
    returns once all have. changed: ranks are to read the mirror of the version that the state is at.
    """

    def __init__(
        self,
        canonical: Canonical,
        memory: Sequence[Tensor],
        *,
        update: Callable[[int, Tensor, float, float], None],
        wait: Callable[[], None],
        changed: Callable[[], None],
    ) -> None:
        self._names, self._memory, self._update, self._changed = list(canonical.shapes), list(memory), update, changed
        self._wait = wait
        self._late = bool(canonical.spec.averaging.delay.most)
        layout = mirrored(canonical)
        self._views = [layout.views(each) for each in memory]

    def weights(self, version: int) -> list[Tensor]:
        self.settle()
        return [self._views[version % 2][name] for name in self._names]

    def weights_of(self, step: int) -> list[Tensor]:
        """At version `step`: the weights that this step was computed on, in canonical order."""
        self.settle()
        views = self._views[step % 2]
        return [views[snapshot.previous_name(name) if self._late else name] for name in self._names]

    def scratch(self, version: int) -> tuple[str, Tensor]:
        """The mirror that does not hold `version`, by name, and its memory: free until the next update."""
        self.settle()
        number = (version + 1) % 2
        return mirror_name(number), self._memory[number]

    def settle(self) -> None:
        self._wait()

    def update(self, version: int, total: Tensor, *, scale: float, rate: float) -> None:
        self._update(version, total, scale, rate)

    def take(self, version: int) -> None:
        self._changed()

    def stay(self, version: int) -> None:
        self.settle()
        # Ranks write only what an update changes, and there is none: carry all of it over.
        self._memory[(version + 1) % 2].copy_(self._memory[version % 2])
        self._changed()

    def reset(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.settle()
        now = self._views[0]
        for name, tensor in weights:
            now[name].copy_(tensor)
            if self._late:
                now[snapshot.previous_name(name)].copy_(tensor)
            for moment in MOMENTS:
                now[snapshot.moment_name(moment, name)].zero_()
        self._changed()

    def read_state(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        self.settle()
        for name, place in self._views[version % 2].items():
            place.copy_(tensors[name])
        self._changed()

    def write_state(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        self.settle()
        for name, held in self._views[version % 2].items():
            tensors[name].copy_(held)


class _Content(NamedTuple):
    """What ranks have added to the sum of `step`, since it was voided for the `voids`th time."""

    step: int
    voids: int
    indexes: frozenset[int]


class SumReading:
    """The flat memory that sums are written to, and the content that it holds now."""

    def __init__(self, flat: Tensor) -> None:
        self.flat = flat
        self.holds: _Content | None = None


class RankSum:
    """`stage.backend.GradientSum`. write(step, voids): has the ranks that are up write that sum to `reading`'s memory;
    raises Refused if they are lost, for ranks started afterwards do not hold it."""

    def __init__(self, ranks: Ranks, reading: SumReading, write: Callable[[int, int], None]) -> None:
        self._ranks, self._reading, self._write = ranks, reading, write
        self._lock = threading.Lock()  # of the void count: held for a moment
        self.voids = self.revoked = 0
        self._lost: int | None = None  # the step whose sum is gone, and not voided since
        self._content = _Content(-1, -1, frozenset())  # replaced, by whoever has the ranks' lock, never changed

    def void(self, *, lost: bool = False) -> None:
        with self._lock:
            self.voids += 1
            self.revoked += not lost
            self._lost = None

    def lose(self) -> None:
        """What ranks held is gone. Whoever has the ranks' lock."""
        with self._lock:
            self.voids += 1
            self._lost = self._content.step if self._content.indexes else self._lost

    def add(self, add: Callable[[], object], *, step: int, index: int, voids: int) -> bool:
        """Have ranks `add` the gradient of that microbatch; see `Accumulator.add`. It may raise: nothing is added."""
        with self._ranks.lock:
            if voids != self.voids:  # a void has overtaken it
                return False
            content = self._entered(step, voids)
            if index in content.indexes:
                return False
            add()  # if it raises, no rank has added anything
            self._content = content._replace(indexes=content.indexes | {index})
        return voids == self.voids  # a void may have come while ranks added: then it counts nowhere

    def read(self, step: int) -> Tensor:
        """The flat sum, valid until the next reading. It waits for ranks only if they have something to write."""
        written = self._written(step)
        if written is not None:
            return written
        with self._ranks.lock:
            with self._lock:
                voids, lost = self.voids, self._lost
            if lost == step:
                raise Refused(RejectCode.NOT_READY, "the sum was lost with the ranks that held it", step=step)
            wanted = self._entered(step, voids)
            # A round reads a sum in many pieces: it is written once.
            if self._reading.holds != wanted:
                self._reading.holds = None  # half written if ranks are lost meanwhile
                if self._content.indexes:
                    self._write(step, voids)
                else:  # nothing was added: no rank need be asked, nor be up
                    self._reading.flat.zero_()
                self._reading.holds = wanted
            return self._reading.flat

    def indexes(self, step: int) -> frozenset[int]:
        with self._ranks.lock:
            return self._entered(step, self.voids).indexes

    def _written(self, step: int) -> Tensor | None:
        """The flat sum if it lies there already. The ranks' lock is held for a whole order: nothing here asks for it.

        Void counts move before anything else does, so content of the count of now is neither lost nor voided.
        """
        with self._lock:
            content = self._content
            stands = self._lost != step and (content.step, content.voids) == (step, self.voids)
            return self._reading.flat if stands and self._reading.holds == content else None

    def _entered(self, step: int, voids: int) -> _Content:
        if self._content[:2] != (step, voids):
            self._content = _Content(step, voids, frozenset())
        return self._content
