"""The single process a swarm is measured against: the whole model, one loop, the same manifest.

Plain autograd on the uncut model, the same microbatches in the same shapes, and the product's optimizer. With
`averaging.sync = "local"` `.backward()` accumulates and `clip_grad_norm_` clips. Otherwise the rounding to integers is
part of what the manifest means, so the reference uses the product's accumulator and update arithmetic on its own
gradients, and adds squared norms per stage, as the commits do. In deterministic mode a swarm's losses and weights are
then the same bits.

With `averaging.sync = "overlap"` a second copy of the model follows, a version behind once steps overlap, and gradients
come from it.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

from swarmnet.data.sampler import Sampler
from swarmnet.data.source import read_tokens
from swarmnet.data.tokens import Tokens
from swarmnet.manifest.extension import Horizon, Notice
from swarmnet.manifest.file import load
from swarmnet.manifest.schema import Manifest
from swarmnet.model.decoder import StageModule, loss_sum
from swarmnet.model.frozen import at_rest
from swarmnet.model.huggingface.checkpoint import Checkpoint, stage_shapes, stage_weights
from swarmnet.model.lora import Base, adapt, draw_factors, drawn_base, frozen_shapes, stage_module
from swarmnet.model.precision import products_in
from swarmnet.stage.accumulator import Accumulator, sum_dtype
from swarmnet.stage.canonical import Canonical, clip_factor, rate_of
from swarmnet.stage.optimizer import StageOptimizer, average, square_norm
from swarmnet.stage.rounding import Roundings
from swarmnet.telemetry.events import EventLog

OnStep = Callable[[int, float, int], None]
"""Called after every step with its number, mean loss and number of tokens."""


@dataclass(slots=True)
class ReferenceResult:
    """losses: mean loss in nats per token of each step, before its update; tokens: per step; weights: after the last.

    evals: mean held-out loss by version, at 0, E, 2E, ... (E = training.eval_every) and the last version.
    """

    losses: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    evals: dict[int, float] = field(default_factory=dict)


@torch.no_grad()
def _begin(module: StageModule, manifest: Manifest) -> None:
    """Give the whole model its weights of version 0, drawn from the seed or read from the run's checkpoint."""
    if manifest.lora.r:
        adapt(module, manifest.lora, _base(manifest), device=torch.device("cpu"))
        draw_factors(module, seed=manifest.training.seed)
        return
    if not manifest.initial.sha256:
        module.reset(seed=manifest.training.seed)
        return
    parameters, folder = dict(module.named_parameters()), Path(manifest.initial.source)
    for stage, shapes in enumerate(stage_shapes(manifest.model, manifest.cut, manifest.training.sequence_length)):
        weights = stage_weights(folder, shapes, stage=stage, agreed=manifest.initial.sha256[stage])
        for name, tensor in weights.items():
            parameters[name].copy_(tensor)


def _base(manifest: Manifest) -> Base:
    """The frozen weights of all stages, read from the run's checkpoint or drawn."""
    stages = [stage_module(spec) for spec in manifest.specs]
    shapes = {name: shape for stage in stages for name, shape in frozen_shapes(stage).items()}
    if not manifest.initial.sha256:
        return drawn_base(manifest.specs[0], shapes)
    checkpoint = Checkpoint(Path(manifest.initial.source))
    return lambda name: at_rest(name, checkpoint.read({name: shapes[name]})[name], manifest.lora.base)


def run_reference(
    manifest: Manifest,
    tokens: Tokens,
    *,
    steps: int | None = None,
    notices: tuple[Notice, ...] = (),
    on_step: OnStep | None = None,
) -> ReferenceResult:
    """Train for `steps` steps (all by default) on the CPU. `tokens` must be the manifest's stream.

    notices: those that take force.
    """
    training, horizon = manifest.training, Horizon(manifest.training.total_steps, notices)
    sampler = Sampler(training.seed, tokens.num_tokens, training.sequence_length, training.microbatch_size)
    with torch.device("meta" if manifest.lora.r else "cpu"):
        module = StageModule(manifest.model, range(manifest.model.num_layers), first=True, last=True)
    _begin(module, manifest)
    delay = manifest.averaging.delay
    behind = copy.deepcopy(module) if delay.most else module
    update = (_Integers if manifest.numerics.integers else _FloatSum)(manifest, horizon, module, behind)
    result = ReferenceResult()
    with contextlib.ExitStack() as after:
        after.callback(torch.set_num_threads, torch.get_num_threads())
        if manifest.numerics.deterministic:  # several threads would sum in an order of their own
            torch.set_num_threads(1)
        after.enter_context(products_in(manifest.numerics.compute, torch.device("cpu")))
        _evaluate(manifest, module, sampler, tokens, 0, horizon.last, result)
        for step in range(horizon.last if steps is None else steps):
            total, num_tokens = 0.0, 0
            for index in range(training.microbatches):
                batch = tokens.microbatch(
                    sampler.positions(step * training.microbatches + index), training.sequence_length
                )
                loss = loss_sum(behind(batch[:, :-1]), batch[:, 1:])
                loss.backward()  # type: ignore[no-untyped-call]
                update.count(index)
                total += loss.item()
                num_tokens += batch[:, 1:].numel()
            update.step(step, num_tokens)
            # Where steps overlap, the next gradient is still that of the weights before these.
            if not delay.behind(step + 1):
                _follow(list(module.parameters()), list(behind.parameters()))
            result.losses.append(total / num_tokens)
            result.tokens.append(num_tokens)
            if on_step is not None:
                on_step(step, total / num_tokens, num_tokens)
            _evaluate(manifest, module, sampler, tokens, step + 1, horizon.last, result)
    result.weights = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    return result


class _FloatSum:
    """One process's gradients as torch sums them: backward has added up in `.grad` already.

    behind: where gradients come from, `module` itself or what follows a version behind it.
    """

    def __init__(self, manifest: Manifest, horizon: Horizon, module: StageModule, behind: StageModule) -> None:
        self._manifest, self._horizon = manifest, horizon
        self._parameters, self._behind = list(module.parameters()), list(behind.parameters())
        self._optimizer = StageOptimizer(self._parameters, manifest.optimizer, delay=manifest.averaging.delay)

    def count(self, index: int) -> None:
        """Take in the gradients that one microbatch's backward left in `.grad`."""

    def step(self, step: int, num_tokens: int) -> None:
        """Update the weights; those that gradients come from follow."""
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        assert len(gradients) == len(self._parameters)
        for gradient in gradients:
            gradient.div_(num_tokens)
        torch.nn.utils.clip_grad_norm_(self._parameters, self._manifest.optimizer.clip_norm)
        self._optimizer.step(gradients, learning_rate=self._rate(step))
        for parameter in self._parameters:
            parameter.grad = None

    def _rate(self, step: int) -> float:
        return rate_of(self._manifest.optimizer, step, self._horizon)


class _Integers(_FloatSum):
    """The product's fixed-point sum and update, on the uncut model."""

    def __init__(self, manifest: Manifest, horizon: Horizon, module: StageModule, behind: StageModule) -> None:
        super().__init__(manifest, horizon, module, behind)
        self._edges = [0, *itertools.accumulate(p.numel() for p in self._parameters)]
        self._stage_of = {name: spec.stage for spec in manifest.specs for name in Canonical.of(spec).shapes}
        self._names = [name for name, _ in module.named_parameters()]
        self._accumulator = Accumulator(self._edges[-1], dtype=sum_dtype(manifest.numerics), device=torch.device("cpu"))
        self._roundings = Roundings(
            manifest.numerics,
            manifest.averaging,
            {name: parameter.shape for name, parameter in module.named_parameters()},
            terms=manifest.training.microbatches,
        )
        self._step = 0

    def count(self, index: int) -> None:
        gradients = []
        for parameter in self._behind:
            assert parameter.grad is not None
            gradients.append(parameter.grad.contiguous())
            parameter.grad = None
        self._accumulator.add(gradients, self._roundings.of(self._step), step=self._step, index=index, discards=0)

    def step(self, step: int, num_tokens: int) -> None:
        total, rounding = self._accumulator.read(step), self._roundings.of(step)
        pieces = [total[start:stop] for start, stop in itertools.pairwise(self._edges)]
        squares = [0.0] * self._manifest.cut.stages
        for place, (name, piece) in enumerate(zip(self._names, pieces, strict=True)):
            # Per stage, as the commits carry them: the order of a sum is part of its bits.
            squares[self._stage_of[name]] += square_norm(piece, rounding=rounding, place=place)
        clipped = clip_factor(squares, num_tokens=num_tokens, clip_norm=self._manifest.optimizer.clip_norm)
        scale = clipped / num_tokens
        gradients = [torch.empty_like(p, requires_grad=False) for p in self._parameters]
        for place, (piece, gradient) in enumerate(zip(pieces, gradients, strict=True)):
            average(piece, gradient.view(-1), scale=scale, rounding=rounding, place=place)
        _follow(self._parameters, self._behind)
        self._optimizer.step(gradients, learning_rate=self._rate(step))
        self._roundings.applied(step, pieces, counted=self._manifest.training.microbatches, clipped=clipped)
        self._step += 1


@torch.no_grad()
def _follow(parameters: Sequence[Parameter], behind: Sequence[Parameter]) -> None:
    """The second copy takes over the weights as they are."""
    for parameter, follower in zip(parameters, behind, strict=True):
        if follower is not parameter:
            follower.copy_(parameter)


@torch.no_grad()
def _evaluate(
    manifest: Manifest,
    module: StageModule,
    sampler: Sampler,
    tokens: Tokens,
    version: int,
    last: int,
    result: ReferenceResult,
) -> None:
    training = manifest.training
    if not training.eval_every or (version % training.eval_every and version < last):
        return
    total, num_tokens = 0.0, 0
    for index in range(training.eval_microbatches):
        batch = tokens.microbatch(sampler.eval_positions(index), training.sequence_length)
        total += loss_sum(module(batch[:, :-1]), batch[:, 1:]).item()
        num_tokens += batch[:, 1:].numel()
    result.evals[version] = total / num_tokens


def main(argv: list[str]) -> int:
    """`python -m swarmnet.testing.reference RUN.toml EVENTS`, as a child. Exit code 0 when every step has been written.

    Writes `reference_step {step, loss, tokens}` events, floats as shortest decimals that read back to the same bits,
    and last `reference_weights {sha256}`: of each tensor's bytes, by name.
    """
    manifest = load(Path(argv[0]))
    with EventLog(Path(argv[1])) as log:
        result = run_reference(
            manifest,
            read_tokens(manifest.data),
            on_step=lambda step, loss, tokens: log.emit("reference_step", step=step, loss=loss, tokens=tokens),
        )
        weights = {name: tensor.numpy().tobytes() for name, tensor in result.weights.items()}
        log.emit("reference_weights", sha256={name: hashlib.sha256(data).hexdigest() for name, data in weights.items()})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
