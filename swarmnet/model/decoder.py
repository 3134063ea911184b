"""A Llama-style decoder in stages: RMSNorm, rotary positions, grouped-query attention, SwiGLU (arXiv:2302.13971).

With biases it is Qwen2, with norms over each query and key head Qwen3; Mistral differs in nothing that shows inside its
window. Parameter names are those of Hugging Face's Llama with the *global* layer index, whatever the stage holds; the
order of `named_parameters()` is the canonical order of the flat gradient. Every parameter goes through `model.split`,
so a forward with a `Tape` can be followed by a backward in two halves; without one this is ordinary torch.

Head counts follow from the width of the projections, so a rank that holds some of the heads runs the same code.
Knows no wire, no optimizer and no other stage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swarmnet.manifest.schema import Model
from swarmnet.model import split
from swarmnet.model.activations import RunLayer, plainly
from swarmnet.model.initial import draw
from swarmnet.model.precision import operand
from swarmnet.model.split import Tape


class Linear(nn.Module):
    """y = x W^T (+ b)."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: Tensor, tape: Tape | None) -> Tensor:
        return split.linear(x, self.weight, self.bias, tape)


class Embedding(nn.Module):
    """Rows of a table."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))

    def forward(self, ids: Tensor, tape: Tape | None) -> Tensor:
        return split.embedding(ids, self.weight, tape)


class RMSNorm(nn.Module):
    """x / rms(x) * w (arXiv:1910.07467), spelled out: only the last product has a parameter. At least fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor, tape: Tape | None) -> Tensor:
        x = x.to(torch.promote_types(x.dtype, torch.float32))  # squares of bf16 lose most of their digits
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return split.scale(normed, self.weight, tape)


class Attention(nn.Module):
    """Causal self-attention, fewer key and value heads than query heads (arXiv:2305.13245)."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        width, self.head_dim = model.hidden_size, model.head_dim
        queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        self.q_proj = Linear(width, queries, bias=model.attention_bias)
        self.k_proj = Linear(width, keys, bias=model.attention_bias)
        self.v_proj = Linear(width, keys, bias=model.attention_bias)
        self.o_proj = Linear(queries, width, bias=model.output_bias)
        self.q_norm = RMSNorm(model.head_dim, model.rms_norm_eps) if model.qk_norm else None
        self.k_norm = RMSNorm(model.head_dim, model.rms_norm_eps) if model.qk_norm else None

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor, tape: Tape | None) -> Tensor:
        batch, length, _ = x_BTD.shape
        x_BTD = operand(x_BTD)

        def heads(projection: Linear, norm: RMSNorm | None) -> Tensor:
            x_BTHC: Tensor = projection(x_BTD, tape).view(batch, length, -1, self.head_dim)
            x_BTHC = x_BTHC if norm is None else norm(x_BTHC, tape)
            return x_BTHC.transpose(1, 2)

        q, k, v = heads(self.q_proj, self.q_norm), heads(self.k_proj, self.k_norm), heads(self.v_proj, None)
        # rotation is in fp32: a position of a long text is no whole number of bf16
        q, k = operand(rotate(q, cos, sin)), operand(rotate(k, cos, sin))
        y_BHTC = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        y_BTD: Tensor = self.o_proj(y_BHTC.transpose(1, 2).reshape(batch, length, -1), tape)
        return y_BTD


class MLP(nn.Module):
    """SwiGLU (arXiv:2002.05202)."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.gate_proj = Linear(model.hidden_size, model.intermediate_size)
        self.up_proj = Linear(model.hidden_size, model.intermediate_size)
        self.down_proj = Linear(model.intermediate_size, model.hidden_size)

    def forward(self, x: Tensor, tape: Tape | None) -> Tensor:
        x = operand(x)
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x, tape)) * self.up_proj(x, tape), tape)
        return y


class Layer(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.self_attn = Attention(model)
        self.mlp = MLP(model)
        self.input_layernorm = RMSNorm(model.hidden_size, model.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(model.hidden_size, model.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, tape: Tape | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x, tape), cos, sin, tape)
        y: Tensor = x + self.mlp(self.post_attention_layernorm(x, tape), tape)
        return y


def layer_of(model: Model) -> Layer:
    """One layer of the architecture that `model` describes: the function in which another one is chosen."""
    return Layer(model)


class Trunk(nn.Module):
    """What Hugging Face calls `model`: everything but the head."""

    def __init__(
        self, model: Model, layers: range, *, first: bool, last: bool, layer: Callable[[Model], Layer]
    ) -> None:
        super().__init__()
        self.embed_tokens = Embedding(model.vocab_size, model.hidden_size) if first else None
        self.layers = nn.ModuleDict({str(index): layer(model) for index in layers})
        self.norm = RMSNorm(model.hidden_size, model.rms_norm_eps) if last else None


class StageModule(nn.Module):
    """Layers `layers` of the model, with the embedding if `first`, with final norm and head if `last`.

    Both flags and all layers make the whole model. Weights are whatever memory held until `reset`. `layer` makes one
    layer of given dimensions; by default `layer_of` does.
    """

    def __init__(
        self, model: Model, layers: range, *, first: bool, last: bool, layer: Callable[[Model], Layer] | None = None
    ) -> None:
        super().__init__()
        self.model = Trunk(model, layers, first=first, last=last, layer=layer or layer_of)
        self.lm_head = Linear(model.hidden_size, model.vocab_size) if last else None
        # only a stage that has both can share them: between stages the head is a matrix of its own
        if model.tie_embeddings and self.lm_head is not None and self.model.embed_tokens is not None:
            self.lm_head.weight = self.model.embed_tokens.weight
        self._dimensions = model
        self._rotary: tuple[Tensor, Tensor] | None = None

    @torch.no_grad()
    def reset(self, *, seed: int) -> None:
        """Draw the weights of version 0."""
        for name, parameter in self.named_parameters():
            parameter.copy_(draw(name, parameter.shape, self._dimensions, seed=seed))

    def forward(self, x: Tensor, tape: Tape | None = None, run: RunLayer = plainly) -> Tensor:
        """x: token ids [B, T] if first, else hidden [B, T, D]. Returns logits [B, T, V] if last, else hidden.

        run: how to run each layer (`model.activations`).
        """
        cos, sin = self._rotary_tables(x.shape[1], x.device)
        if self.model.embed_tokens is not None:
            x = self.model.embed_tokens(x, tape)
        for layer in self.model.layers.values():
            x = run(layer, x, cos, sin, tape)
        if self.model.norm is not None and self.lm_head is not None:
            x = self.lm_head(self.model.norm(x, tape), tape)
        return x

    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that train, by name in canonical order. Gradients, optimizer, snapshots and layouts are of
        these alone; a parameter that is frozen is in none of them."""
        return {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}

    def lasting(self) -> Iterator[Tensor]:
        """What forward reads and does not make: weights and tables."""
        yield from self.parameters()
        yield from self.buffers()
        yield from self._rotary or ()

    def loss_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The sum of the tokens' losses: logits are what `forward` of a last stage has returned, labels [B, T]."""
        return loss_sum(logits, labels)

    def _rotary_tables(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        if self._rotary is None or self._rotary[0].shape[0] != length or self._rotary[0].device != device:
            # Made again only where length or device change.
            self._rotary = rotary_tables(self._dimensions, length, device)
        return self._rotary


def rotary_tables(model: Model, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, head_dim] of rotary positions (arXiv:2104.09864); pairs are (c, c + head_dim / 2)."""
    powers = torch.arange(0, model.head_dim, 2, dtype=torch.float32) / model.head_dim
    frequencies = _scaled(1.0 / model.rope_theta**powers, model)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    # computed on the CPU for every device: each would round cosines in its own way
    return angles.cos().to(device), angles.sin().to(device)


def _scaled(frequencies: Tensor, model: Model) -> Tensor:
    """Radians per token of each pair, for sequences longer than a model was first trained on.

    "linear" slows all pairs down (arXiv:2306.15595). "llama3" (arXiv:2407.21783) those that turn less than
    `rope_low_freq_factor` times in the original length, keeps those above `rope_high_freq_factor`, and goes from one to
    the other in between.
    """
    if model.rope_scaling == "none":
        return frequencies
    # Every pair turns slower by the same factor.
    if model.rope_scaling == "linear":
        return frequencies / model.rope_factor
    low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
    turns = model.rope_original_length * frequencies / (2 * math.pi)  # of each pair, over the original length
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / model.rope_factor + kept * frequencies


def rotate(x_BHTC: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> Tensor:
    """Turn each pair of channels by its position's angle."""
    low, high = x_BHTC.chunk(2, dim=-1)
    return x_BHTC * cos_TC + torch.cat((-high, low), dim=-1) * sin_TC


def loss_sum(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """Cross entropy in nats, *summed* over tokens, at least fp32; the division by their count comes at the step."""
    logits_NV = logits_BTV.flatten(0, 1)
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))  # exponentials need the digits
    return F.cross_entropy(logits_NV, labels_BT.flatten().long(), reduction="sum")
