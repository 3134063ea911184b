"""What the peer process holds of a stage that ranks compute: its state, and what it knows of the sums of open steps.

The state is what a version is when all who compute it are gone: two copies of weights and moments, whole and in
canonical order, in memory that ranks share. Number version % 2 is `version`, the other is where ranks write the next
one. Only when every rank has answered does the version count up. So a rank that dies in the middle of an update leaves
this version whole, and the update is done again. Snapshots and digests are read here and never hold up a rank; nowhere
does one device have all of it.

Of the sum of an open step ranks hold the terms (`ranks.stage`). Whose gradients were added, and which additions a void
has overtaken, is counted here. A sum that is lost with its ranks is refused until somebody has voided it: whoever takes
part in a round must not take zeros for what it counted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from swarmnet.errors import Refused, RejectCode
from swarmnet.messages import Commit
from swarmnet.model.initial import draw
from swarmnet.ranks.restarts import Ranks
from swarmnet.stage import snapshot
from swarmnet.stage.canonical import Canonical, Initial, Update
from swarmnet.stage.optimizer import MOMENTS
from swarmnet.stage.outer import Outer

Views = dict[str, Tensor]
"""The tensors of a state in one memory, by their names in a snapshot."""


def mirrored(canonical: Canonical) -> snapshot.Layout:
    """Where each tensor lies in the memory of a mirror: in the peer process and on every rank alike."""
    apart = {*map(snapshot.slow_name, canonical.shapes), *map(snapshot.outer_momentum_name, canonical.shapes)}
    shapes = {name: shape for name, shape in canonical.state_shapes.items() if name not in apart}
    return snapshot.Layout(shapes, stage=canonical.stage)


class HostState:
    """`stage.backend.State` in two mirrors. memory: of each, of `mirrored(canonical).num_bytes`.

    update: has ranks lead on from `version` with (total, how) and write the mirror of the next one; it does not return
    before all have. changed: ranks are to read the mirror of `version`. The outer optimizer's tensors (`sync =
    "local"`) are of no rank's concern, and not in the mirrors.
    """

    def __init__(
        self,
        canonical: Canonical,
        memory: Sequence[Tensor],
        *,
        update: Callable[[Tensor, Update], None],
        changed: Callable[[], None],
        initial: Initial | None = None,
    ) -> None:
        self.canonical, self.version, self._initial = canonical, 0, initial
        self._update, self._changed = update, changed
        layout = mirrored(canonical)
        self._views = [layout.views(each) for each in memory]
        self._memory = list(memory)
        self._delay = canonical.manifest.averaging.delay
        self.outer = Outer.of(canonical.manifest.averaging, self.newest)
        self._outer_steps = 0  # that ranks have been told of

    @property
    def newest(self) -> list[Tensor]:
        """The weights of `version`."""
        return [self._now[name] for name in self.canonical.shapes]

    @property
    def _now(self) -> Views:
        return self._views[self.version % 2]

    def apply(self, total: Tensor, commits: Sequence[Commit], *, own_tokens: int | None = None) -> None:
        update = self.canonical.update(self.version, total, commits, own_tokens=own_tokens)
        if self.outer is not None and self.outer.steps != self._outer_steps:
            self._tell()
        self._update(total, update)
        self._become(self.version + 1)

    def stay(self, commits: Sequence[Commit]) -> None:
        self.canonical.check(self.version, commits)
        # ranks write only what an update changes, and there is none: carry all of it over
        self._memory[(self.version + 1) % 2].copy_(self._memory[self.version % 2])
        self._become(self.version + 1)
        self._tell()

    def reset_to_seed(self) -> None:
        model, seed = self.canonical.manifest.model, self.canonical.manifest.training.seed
        found = self._initial() if self._initial is not None else None  # first: its files may be gone
        self._become(0)
        for name, shape in self.canonical.shapes.items():
            weights = found[name] if found is not None else draw(name, shape, model, seed=seed)
            self._now[name].copy_(weights)
            if self._delay.most:
                self._now[snapshot.previous_name(name)].copy_(weights)
            for moment in MOMENTS:
                self._now[snapshot.moment_name(moment, name)].zero_()
        if self.outer is not None:
            self.outer.reset()
        self._tell()

    def copy(self, memory: Tensor) -> int:
        self.canonical.layout.copy(self._tensors(), memory)
        return self.version

    def take_over(self, tensors: Mapping[str, Tensor], *, version: int) -> None:
        self._become(version)
        for name, tensor in self._tensors().items():
            tensor.copy_(tensors[name])
        self._tell()

    def _tell(self) -> None:
        if self.outer is not None:
            self._outer_steps = self.outer.steps
        self._changed()

    def _become(self, version: int) -> None:
        self.version = version
        if self.outer is not None:
            self.outer.follow(self.newest)

    def _tensors(self) -> Views:
        outer = {} if self.outer is None else self.outer.tensors(list(self.canonical.shapes))
        return self._now | outer


class SumReading:
    """The flat memory that sums are written to, and which one it holds now: (step, voids, how many were added)."""

    def __init__(self, flat: Tensor) -> None:
        self.flat = flat
        self.holds: tuple[int, int, int] | None = None


class _Content(NamedTuple):
    """What ranks have added to the sum of `step`, since it was voided for the `voids`th time."""

    step: int
    voids: int
    indexes: frozenset[int]


class RankSum:
    """`stage.backend.GradientSum`. write(step, voids): has the ranks that are up write that sum to `reading`'s memory;
    raises Refused if they are lost, for ranks started afterwards do not hold it."""

    def __init__(self, ranks: Ranks, reading: SumReading, write: Callable[[int, int], None]) -> None:
        self._ranks, self._reading, self._write = ranks, reading, write
        self._lock = threading.Lock()  # of the void count: held for a moment
        self._voids = self._revoked = 0
        self._lost: int | None = None  # the step whose sum is gone, and not voided since
        self._content = _Content(-1, -1, frozenset())  # replaced, by whoever has the ranks' lock, never changed

    @property
    def voids(self) -> int:
        """How often it has been voided, or lost."""
        with self._lock:
            return self._voids

    @property
    def revoked(self) -> int:
        with self._lock:
            return self._revoked

    def void(self, *, lost: bool = False) -> None:
        with self._lock:
            self._voids += 1
            self._revoked += not lost
            self._lost = None

    def lose(self) -> None:
        """What ranks held is gone. Whoever has the ranks' lock."""
        with self._lock:
            self._voids += 1
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
                voids, lost = self._voids, self._lost
            if lost == step:
                raise Refused(RejectCode.NOT_READY, "the sum was lost with the ranks that held it", step=step)
            wanted = _held(self._entered(step, voids))
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
            stands = self._lost != step and (content.step, content.voids) == (step, self._voids)
            return self._reading.flat if stands and self._reading.holds == _held(content) else None

    def _entered(self, step: int, voids: int) -> _Content:
        if self._content[:2] != (step, voids):
            self._content = _Content(step, voids, frozenset())
        return self._content


def _held(content: _Content) -> tuple[int, int, int]:
    return content.step, content.voids, len(content.indexes)
