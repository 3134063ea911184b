"""The state of a stage on ranks, in host memory: what a version is when all who compute it are gone.

Two copies of weights and moments, whole and in canonical order, in memory that ranks share: number version % 2 is
`version`, the other is where ranks write the next one. Only when every rank has answered does the version count up. So
a rank that dies in the middle of an update leaves this version whole, and the update is done again. Snapshots and
digests are read here, and never hold up a rank; nowhere does one device have all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from swarmnet.messages import Commit
from swarmnet.model.initial import draw
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


class MirrorState:
    """`stage.body.State` in two mirrors. memory: of each, of `mirrored(canonical).num_bytes`.

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
