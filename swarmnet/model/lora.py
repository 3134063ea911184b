"""Adapters of low rank beside frozen weights (LoRA, arXiv:2106.09685), under the names that PEFT gives them.

`adapt` turns a stage into one of which only the factors A [r, I] and B [O, r] of the adapted matrices are parameters. A
is drawn as PEFT draws it, B is 0: an adapter begins as nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from swarmnet.manifest.schema import LINEAR, Lora, StageSpec
from swarmnet.model.cut import cut_layers
from swarmnet.model.decoder import Embedding, Linear, RMSNorm, StageModule
from swarmnet.model.frozen import FrozenLinear, FrozenWeight, Parts, at_rest, freeze
from swarmnet.model.initial import draw, draw_factor

EMBEDDING = "model.embed_tokens.weight"

Base = Callable[[str], Parts]
"""The frozen weight of that Hugging Face name at rest, as far as it is held here."""


def stage_module(spec: StageSpec) -> StageModule:
    """The stage without adapters: names and shapes of a checkpoint, on the meta device."""
    layers = cut_layers(spec.model, spec.cut, spec.training.sequence_length)[spec.stage]
    with torch.device("meta"):
        return StageModule(spec.model, layers, first=spec.first, last=spec.last)


def frozen_shapes(module: StageModule) -> dict[str, torch.Size]:
    """Of all weights that a checkpoint has of a stage, by name; in a run with adapters they are frozen."""
    return {name: parameter.shape for name, parameter in module.named_parameters()}


def trained_shapes(module: StageModule, lora: Lora) -> dict[str, torch.Size]:
    """Of what trains, by name in canonical order: `module` is not adapted yet."""
    if not lora.r:
        return {name: parameter.shape for name, parameter in module.trained().items()}
    found: dict[str, torch.Size] = {}
    for name, target in _targets(module, lora):
        rows, columns = target.weight.shape
        found |= {f"{name}.lora_A.weight": torch.Size([lora.r, columns])}
        found |= {f"{name}.lora_B.weight": torch.Size([rows, lora.r])}
    return found


def adapt(module: StageModule, lora: Lora, base: Base, *, device: torch.device) -> None:
    """Freeze `module`, which is on the meta device, with the weights of `base`, and give it adapters, not yet drawn."""
    head, table = module.lm_head, module.model.embed_tokens
    # A tied head is the embedding: it rests once.
    tied = head is not None and table is not None and head.weight is table.weight
    targets = dict(_targets(module, lora))
    for name, child in [*module.named_modules()]:
        if isinstance(child, Linear):
            parts = base(EMBEDDING if tied and child is head else f"{name}.weight")
            bias = None if child.bias is None else base(f"{name}.bias")["whole"]
            factors = _factors(child, lora, device) if name in targets else None
            owner, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner), attribute, FrozenLinear(parts, bias, lora=factors))
        elif isinstance(child, Embedding | RMSNorm):
            freeze(child, "weight", base(f"{name}.weight")["whole"])


def drawn_base(spec: StageSpec, shapes: Mapping[str, torch.Size]) -> Base:
    """Frozen weights of a run that begins with no checkpoint. shapes: `frozen_shapes`."""

    def of(name: str) -> Parts:
        return at_rest(name, draw(name, shapes[name], spec.model, seed=spec.training.seed), spec.lora.base)

    return of


def draw_factors(module: StageModule, *, seed: int) -> None:
    """Give an adapted module the adapters of version 0."""
    with torch.no_grad():
        for name, parameter in module.trained().items():
            parameter.copy_(draw_factor(name, parameter.shape, seed=seed))


def merged(
    shapes: Iterable[str], lora: Lora, base: Base, adapters: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """The weights of those names, fp32, with their adapters in them, as PEFT merges them (`merge_and_unload`)."""
    for name in shapes:
        weight, module = FrozenWeight(base(name)).get(torch.float32), name.removesuffix(".weight")
        a, b = (adapters.get(f"{module}.{factor}.weight") for factor in ("lora_A", "lora_B"))
        yield name, weight if a is None or b is None else weight + (b @ a) * lora.scaling


def _factors(target: Linear, lora: Lora, device: torch.device) -> tuple[Linear, Linear, float]:
    rows, columns = target.weight.shape
    with torch.device(device):
        return Linear(columns, lora.r), Linear(lora.r, rows), lora.scaling


def _targets(module: nn.Module, lora: Lora) -> Iterator[tuple[str, Linear]]:
    wanted = LINEAR if lora.target_modules == "all-linear" else lora.target_modules
    for name, child in module.named_modules():
        if isinstance(child, Linear) and name.rpartition(".")[2] in wanted:
            yield name, child
