"""Embedding and cross entropy over a vocabulary whose rows ranks share (arXiv:1909.08053): full logits exist nowhere.

A rank looks up the tokens whose rows it has and adds nothing for the others. Of the loss, ranks exchange two numbers
per token: the largest logit, and then, together, the sum of exponentials and the label's logit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from swarmnet.model.comm import Comm
from swarmnet.model.decoder import Embedding
from swarmnet.model.split import Tape


def look_up(ids_BT: Tensor, table: Embedding, rows: range, tape: Tape | None) -> Tensor:
    """This rank's term [B, T, D] of the embedding: rows of `table`, which holds the ids of `rows`; 0 for other ids."""
    own = ids_BT - rows.start
    elsewhere = (own < 0) | (own >= len(rows))
    x_BTD: Tensor = table(own.masked_fill(elsewhere, 0), tape)
    return x_BTD.masked_fill(elsewhere.unsqueeze(-1), 0)


def cross_entropy_sum(logits_BTV: Tensor, labels_BT: Tensor, rows: range, comm: Comm) -> Tensor:
    """Cross entropy in nats, summed over tokens, the same on every rank; at least fp32.

    logits_BTV: of the ids of `rows` only; together the ranks' cover the vocabulary. Every label counts. Two
    all-reduces; backward has none, and works in the memory of the probabilities, so it runs once.
    """
    logits_NV = logits_BTV.flatten(0, 1)
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    loss: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits_NV, labels_BT.flatten().long() - rows.start, comm
    )
    return loss


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, own_N: Tensor, comm: Comm) -> Tensor:
        elsewhere_N = (own_N < 0) | (own_N >= logits_NV.shape[1])
        column_N1 = own_N.masked_fill(elsewhere_N, 0).unsqueeze(1)
        largest_N = comm.all_reduce(logits_NV.amax(-1), "max")
        shifted_NV = logits_NV - largest_N.unsqueeze(1)
        label_N = shifted_NV.gather(1, column_N1).squeeze(1).masked_fill(elsewhere_N, 0)
        exponentials_NV = shifted_NV.exp_()
        total_N, label_N = comm.all_reduce(torch.stack((exponentials_NV.sum(-1), label_N))).unbind()
        ctx.save_for_backward(exponentials_NV.div_(total_N.unsqueeze(1)), column_N1, elsewhere_N)
        return (total_N.log() - label_N).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        probabilities_NV, column_N1, elsewhere_N = ctx.saved_tensors
        here_N1 = (~elsewhere_N).unsqueeze(1).to(probabilities_NV.dtype)
        return probabilities_NV.scatter_add_(1, column_N1, -here_N1).mul_(grads[0]), None, None
