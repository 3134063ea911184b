"""The whole model in one process: its weights given stage by stage, its loss on a microbatch, and what it writes.

A look at what a model has learned, not a way to serve it: every token runs the whole sequence again. Knows no
tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from swarmnet.manifest.schema import Lora, Model
from swarmnet.model.decoder import StageModule
from swarmnet.model.lora import Base, adapt
from swarmnet.model.precision import Compute, products_in


@torch.no_grad()
def whole(
    model: Model, stages: Iterable[Mapping[str, Tensor]], *, lora: Lora | None = None, base: Base | None = None
) -> StageModule:
    """All layers of `model` on the CPU, with the tensors of `stages`, which may come one by one. base: the frozen
    weights that adapters of `lora` belong to."""
    with torch.device("cpu" if base is None else "meta"):
        module = StageModule(model, range(model.num_layers), first=True, last=True)
    if base is not None:
        assert lora is not None
        adapt(module, lora, base, device=torch.device("cpu"))
    parameters = dict(module.named_parameters())
    for weights in stages:
        for name, tensor in weights.items():
            # Copied at once, so that one stage's tensors can be freed before the next come.
            parameters[name].copy_(tensor)
    return module


@torch.no_grad()
def loss_of(module: StageModule, tokens: Tensor, *, compute: Compute = "fp32") -> float:
    """The loss in nats, summed over the labels, of tokens [B, T + 1]; compute: as in the run's manifest."""
    with products_in(compute, torch.device("cpu")):
        logits = module(tokens[:, :-1])
        return float(module.loss_sum(logits, tokens[:, 1:]).item())


@torch.no_grad()
def generate(
    module: StageModule,
    prompt: Sequence[int],
    *,
    num_tokens: int,
    context: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> Iterator[int]:
    """The `num_tokens` ids that follow `prompt`, of the whole model `module`.

    context: the model sees so many ids before the next one, at most. temperature: 0 takes the likeliest id, otherwise
    ids are drawn, with `seed` (below 2^64), from probabilities with logits divided by it. Raises ValueError for an
    empty prompt.
    """
    if not prompt:
        raise ValueError("a model continues something: the prompt is empty")
    generator, ids = torch.Generator().manual_seed(seed), list(prompt)
    for _ in range(num_tokens):
        # No cache of keys: a look at a model, not a way to serve it.
        logits_V = module(torch.tensor([ids[-context:]]))[0, -1].double()
        if temperature:
            likely_V = ((logits_V - logits_V.max()) / temperature).softmax(-1)  # at most 0: nothing overflows
            chosen = torch.multinomial(likely_V, 1, generator=generator)
        else:
            chosen = logits_V.argmax()
        ids.append(int(chosen.item()))
        yield ids[-1]
