"""Tiny random models of transformers, by name: odd head counts, tied and untied, every way of scaling positions."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from swarmnet.data.sampler import Sampler
from swarmnet.data.tokens import Tokens
from swarmnet.manifest.schema import Manifest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 30,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 10,
    "max_position_embeddings": 64,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-narrow": ("llama", {"head_dim": 8}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biased": ("llama", {"attention_bias": True}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama-llama3": (
        "llama",
        {"rope_parameters": _LLAMA3, "num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 8},
    ),
    "mistral-odd": ("mistral", {"num_attention_heads": 7, "num_key_value_heads": 7, "sliding_window": None}),
    "mistral": (
        "mistral",
        {"num_attention_heads": 10, "num_key_value_heads": 5, "head_dim": 8, "sliding_window": None},
    ),
    "mistral-window": ("mistral", {"sliding_window": 48}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 48, "max_window_layers": 1}),
    "qwen3-window": ("qwen3", {"use_sliding_window": True, "sliding_window": 48, "max_window_layers": 2}),
    "qwen2": ("qwen2", {}),
    "qwen2-narrow": ("qwen2", {"head_dim": 8}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"num_attention_heads": 9, "num_key_value_heads": 3}),
    "qwen3-tied-biased": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
}


@functools.cache
def _classes() -> dict[str, tuple[Any, Any]]:
    """Config and model by kind. Importing transformers takes seconds: only the process that runs these tests does."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.mistral import MistralConfig, MistralForCausalLM
    from transformers.models.qwen2 import Qwen2Config, Qwen2ForCausalLM
    from transformers.models.qwen3 import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    return {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "mistral": (MistralConfig, MistralForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }


def make(case: str) -> PreTrainedModel:
    """The model, all weights random: transformers itself would leave biases at 0 and norms at 1."""
    kind, changes = CASES[case]
    config, model_class = _classes()[kind]
    model = model_class(config(**_SIZES | {"tie_word_embeddings": False} | changes)).float().eval()
    generator = torch.Generator().manual_seed(len(case))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            middle = 1.0 if "norm" in name else 0.0
            parameter.copy_(middle + 0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def save(case: str, folder: Path, *, shard: str = "20KB") -> PreTrainedModel:
    """Write it as transformers does, in several files."""
    model = make(case)
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """What transformers computes."""
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def loaded(folder: Path) -> PreTrainedModel:
    """What transformers makes of the files in `folder`, strictly: no tensor missing, none left over."""
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return model.eval()


def first_loss(folder: Path, manifest: Manifest, tokens: Tokens) -> float:
    """What transformers says is the mean loss of step 0 of a run that begins with the files in `folder`."""
    training, model, losses = manifest.training, loaded(folder), []
    sampler = Sampler(training.seed, tokens.num_tokens, training.sequence_length, training.microbatch_size)
    for index in range(training.microbatches):
        batch = tokens.microbatch(sampler.positions(index), training.sequence_length).long()
        found = logits(model, batch[:, :-1])
        losses.append(torch.nn.functional.cross_entropy(found.flatten(0, 1), batch[:, 1:].flatten()).item())
    return sum(losses) / len(losses)
