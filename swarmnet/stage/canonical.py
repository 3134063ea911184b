"""A stage's state in canonical form: names, shapes and order, whatever computes it, and how it goes on.

The flat gradient is one parameter that trains after the other, in canonical order (`StageModule.trained`); a snapshot
holds weights, moments and whatever else the run asks for under the names of `stage.snapshot`. The two numbers that turn
a summed gradient into an update, learning rate and gradient scale, are computed in fp64 from the manifest, the notices
in force and the commits alone, so that all replicas of all stages find the same. Holds no tensor of the state.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swarmnet.errors import BadMessage, RejectCode
from swarmnet.manifest.extension import Horizon, Notice
from swarmnet.manifest.schema import Averaging, Optimizer, StageSpec
from swarmnet.messages import Commit
from swarmnet.model.cut import cut_layers
from swarmnet.model.initial import draw, draw_factor
from swarmnet.model.lora import stage_module, trained_shapes
from swarmnet.stage import snapshot
from swarmnet.stage.optimizer import MOMENTS, square_norm
from swarmnet.stage.rounding import Rounding, matrix_of, scales_name
from swarmnet.stage.same_bits import cosine

CLIP_EPS = 1e-6
"""Keeps the clip factor finite for a zero gradient; the same constant as in torch's `clip_grad_norm_`."""


def learning_rate(optimizer: Optimizer, step: int, *, total_steps: int) -> float:
    """The rate of optimizer step `step`, counted from 0.

    Linear warm-up over `warmup_steps` (the first step already moves, the last of them has the full rate), then
    `constant`; `cosine` down to `min_lr_ratio` at `total_steps`; or `wsd` (warm-up, stable, decay, arXiv:2404.06395):
    constant, then linear over the last `decay_steps` down to `min_lr_ratio`.
    """
    peak, floor = optimizer.learning_rate, optimizer.min_lr_ratio
    # The first step already moves; the last one of the warm-up has the full rate.
    if step < optimizer.warmup_steps:
        return peak * (step + 1) / optimizer.warmup_steps
    if optimizer.schedule == "cosine":
        span = max(total_steps - optimizer.warmup_steps, 1)
        progress = min((step - optimizer.warmup_steps) / span, 1.0)
        return peak * (floor + (1 - floor) * 0.5 * (1 + cosine(math.pi * progress)))
    if optimizer.schedule == "wsd" and optimizer.decay_steps:
        progress = min(max((step - (total_steps - optimizer.decay_steps)) / optimizer.decay_steps, 0.0), 1.0)
        return peak * (1 - (1 - floor) * progress)
    return peak


def rate_of(optimizer: Optimizer, step: int, horizon: Horizon) -> float:
    """The rate of step `step` in a run that its owner may have extended (docs/upgrading.md).

    From the step on at which a notice takes force the rate is that of a run planned for the new number of steps from
    the start. Where that is more than the rate of the step before, it climbs there as fast as in the warm-up.
    """
    held = horizon.before(step + 1)
    planned = learning_rate(optimizer, step, total_steps=held.last)
    # Not extended yet, or a run without a warm-up, which may jump.
    if not held.notices or not optimizer.warmup_steps:
        return planned
    since = held.notices[-1].value.since
    before = rate_of(optimizer, since - 1, horizon.before(since))
    climbed = before + optimizer.learning_rate * (step - since + 1) / optimizer.warmup_steps
    return min(planned, climbed)


def clip_factor(grad_sq_norms: Sequence[float], *, num_tokens: int, clip_norm: float) -> float:
    """What clipping leaves of the average gradient's length, at most 1.

    grad_sq_norms: squared norms of each stage's *sum*, in stage order (the order fixes the bits).
    """
    if num_tokens <= 0:
        raise ValueError(f"a step needs tokens, num_tokens = {num_tokens}")
    # One after the other, in stage order: another order would give other bits.
    total = 0.0
    for square in grad_sq_norms:
        total += square
    norm = math.sqrt(total) / num_tokens
    return min(1.0, clip_norm / (norm + CLIP_EPS))


Initial = Callable[[], Mapping[str, Tensor]]
"""Reads the weights of version 0, by name."""


@dataclass(frozen=True, slots=True)
class Update:
    """One step of the optimizer: the average gradient is the sum times `scale`, clipping included."""

    scale: float
    rate: float
    clipped: float
    """What clipping has left of the average gradient's length."""


class Canonical:
    """Names and shapes of one stage. shapes: of its parameters by name, in canonical order."""

    def __init__(self, spec: StageSpec, shapes: Mapping[str, torch.Size]) -> None:
        self.spec, self.stage, self.shapes = spec, spec.stage, dict(shapes)
        self.edges = [0, *itertools.accumulate(shape.numel() for shape in shapes.values())]
        self.scale_shapes = _scale_shapes(spec.averaging, self.shapes)
        self.state_shapes = _state_shapes(spec.averaging, self.shapes) | self.scale_shapes
        self.layout = snapshot.Layout(self.state_shapes, stage=spec.stage)
        self.notices: tuple[Notice, ...] = ()
        """Those in force: with them the schedule is another."""

    @classmethod
    def of(cls, spec: StageSpec) -> Canonical:
        """The canonical form of a stage."""
        return cls(spec, trained_shapes(stage_module(spec), spec.lora))

    @property
    def horizon(self) -> Horizon:
        """How many steps the run has."""
        return Horizon(self.spec.training.total_steps, self.notices)

    @property
    def num_elements(self) -> int:
        """Length of the flat gradient."""
        return self.edges[-1]

    def pieces(self, flat: Tensor) -> list[Tensor]:
        """A flat tensor over all elements, cut into the parameters: flat views, in canonical order."""
        return [flat[start:stop] for start, stop in itertools.pairwise(self.edges)]

    def square_norm(self, total: Tensor, rounding: Rounding) -> float:
        """Squared L2 norm of a flat sum: per parameter in fp64, added in canonical order."""
        squares = 0.0
        for place, piece in enumerate(self.pieces(total)):
            squares += square_norm(piece, rounding=rounding, place=place)
        return squares

    def update(
        self, version: int, commits: Sequence[Commit], *, own_tokens: int | None = None, own_square: float = 0.0
    ) -> Update:
        """How `version` goes on with these commits, one of each stage.

        own_tokens: that the sum is over, where it is this replica's own. Then its own squared norm `own_square` counts
        in the norm by which it is clipped, and those of other stages are what their commits say. Raises as `check`.
        """
        self.check(version, commits)
        summed = [(commit.grad_sq_norm, commit.num_tokens) for commit in commits]
        if own_tokens is not None:
            summed[self.stage] = own_square, own_tokens
        # The last stage's tokens; a sum over fewer counts as it would over as many, with the same gradient per token.
        tokens = commits[-1].num_tokens
        norms = [square * (tokens / num_tokens) ** 2 for square, num_tokens in summed]
        table = self.spec.optimizer
        clipped = clip_factor(norms, num_tokens=tokens, clip_norm=table.clip_norm)
        # Where no stage has skipped a microbatch, both factors are exactly 1 (docs/numerics.md).
        scale = clipped / tokens * (tokens / summed[self.stage][1])
        return Update(scale, rate_of(table, version, self.horizon), clipped)

    def check(self, version: int, commits: Sequence[Commit]) -> None:
        """Are these the commits that lead on from `version`?

        Raises BadMessage for a commit without tokens or norm, ValueError for other commits.
        """
        stages = [(commit.stage, commit.step) for commit in commits]
        # In stage order, in which the norm is summed.
        if stages != [(stage, version) for stage in range(self.spec.cut.stages)]:
            raise ValueError(f"version {version} needs a commit of each stage, in order; got {stages}")
        if not all(commit.num_tokens > 0 and 0 <= commit.grad_sq_norm < math.inf for commit in commits):
            raise BadMessage(RejectCode.MALFORMED, "a commit without tokens or norm", step=version)

    def initial(self, read: Initial | None) -> Iterator[tuple[str, Tensor]]:
        """The weights of version 0, one after the other: from the checkpoint that the run begins with, or its seed."""
        model, seed = self.spec.model, self.spec.training.seed

        def first(name: str, shape: torch.Size) -> Tensor:
            # The checkpoint of a run with adapters is what is frozen.
            return draw_factor(name, shape, seed=seed) if self.spec.lora.r else draw(name, shape, model, seed=seed)

        # Read now, not with the first weight: the files may be gone, and then nothing may have changed.
        found = read() if read is not None else None
        return ((name, first(name, shape) if found is None else found[name]) for name, shape in self.shapes.items())

    def unpack(self, data: bytes | memoryview, *, version: int) -> dict[str, Tensor]:
        """The tensors of a snapshot that fits this stage, checked. Raises BadMessage."""
        tensors = snapshot.unpack(data, self.state_shapes, stage=self.stage, version=version)
        # An update takes the root of each second moment, and divides by scales.
        for name in (*(snapshot.moment_name("exp_avg_sq", name) for name in self.shapes), *self.scale_shapes):
            if bool((tensors[name] < 0).any()):
                raise BadMessage(RejectCode.MALFORMED, "a number of the state is negative", name=name)
        return tensors


def layers_of(spec: StageSpec) -> range:
    """The decoder blocks that this stage has."""
    return cut_layers(spec.model, spec.cut, spec.training.sequence_length)[spec.stage]


def _state_shapes(averaging: Averaging, shapes: Mapping[str, torch.Size]) -> dict[str, torch.Size]:
    """Names and shapes of everything in a snapshot."""
    found: dict[str, torch.Size] = {}
    for name, shape in shapes.items():
        names = [name, *(snapshot.moment_name(moment, name) for moment in MOMENTS)]
        # A joiner also computes the step that is open on the weights one version earlier.
        if averaging.delay.most:
            names.append(snapshot.previous_name(name))
        # A joiner goes on from the same slow weights and outer momentum.
        if averaging.sync == "local":
            names += [snapshot.slow_name(name), snapshot.outer_momentum_name(name)]
        found |= dict.fromkeys(names, shape)
    return found


def _scale_shapes(averaging: Averaging, shapes: Mapping[str, torch.Size]) -> dict[str, torch.Size]:
    """Of these the grids of open steps: small numbers of bytes, which the peer process holds (`stage.rounding`)."""
    if averaging.codec != "small":
        return {}
    late = range(1 + averaging.delay.most)
    return {scales_name(name, by): torch.Size([sum(matrix_of(shape))]) for name, shape in shapes.items() for by in late}
