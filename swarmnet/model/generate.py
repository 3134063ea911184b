"""Continue a text, token by token: a look at what a model has learned, not a way to serve it.

Every token runs the whole sequence again; nothing is cached. Knows no tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from swarmnet.model.decoder import StageModule


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
        logits_V = module(torch.tensor([ids[-context:]]))[0, -1].double()
        if temperature:
            likely_V = ((logits_V - logits_V.max()) / temperature).softmax(-1)  # at most 0: nothing overflows
            chosen = torch.multinomial(likely_V, 1, generator=generator)
        else:
            chosen = logits_V.argmax()
        ids.append(int(chosen.item()))
        yield ids[-1]
