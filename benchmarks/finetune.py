"""Steps of one stage with adapters: beside all weights training, frozen weights in 4 bits, and a plain loop of PEFT's.

    python benchmarks/finetune.py [--turns N] [--json FILE] [--quick]

Ours is what a replica's compute thread does (benchmarks/mfu.py). The plain loop is the same model in transformers with
the same adapters in PEFT, clip_grad_norm_ and torch's fused AdamW. All take turns in one process on one thread, in
fp32; a ratio is the median over turns of neighbours. Bytes are exact: what a member contributes to a step's aggregate,
and a snapshot for a joiner.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from harness import Benchmark, in_turns, ratio, write
from mfu import CPU, TINY, Replica, Size, Step, timed
from torch import Tensor

from swarmnet.manifest.schema import Averaging, Base, Lora, Manifest
from swarmnet.model.decoder import StageModule
from swarmnet.model.huggingface.config import config_of

_DEVICE = torch.device("cpu")

SMALL = replace(TINY, model=TINY.model.model_copy(update={"intermediate_size": 192}))
"""4 bits need whole blocks of 64."""


def run_of(size: Size, base: Base | None, rank: int) -> Manifest:
    """Base None: all weights train."""
    lora = Lora() if base is None else Lora(r=rank, lora_alpha=2.0 * rank, base=base)
    averaging = Averaging(codec="small" if base is None else "int64")
    return size.manifest("fp32").model_copy(update={"lora": lora, "averaging": averaging})


def plain(manifest: Manifest, batches: list[Tensor]) -> Step:
    """A loop as anybody writes it."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    table, lora, length = manifest.optimizer, manifest.lora, manifest.training.sequence_length
    whole = StageModule(manifest.model, range(manifest.model.num_layers), first=True, last=True)
    whole.reset(seed=manifest.training.seed)
    base = LlamaForCausalLM(LlamaConfig(**config_of(manifest.model, longest=length)))
    base.load_state_dict(whole.state_dict(), strict=False)
    config = LoraConfig(r=lora.r, lora_alpha=lora.lora_alpha, target_modules="all-linear")
    model = get_peft_model(base, config).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    adamw = torch.optim.AdamW(trained, lr=table.learning_rate, weight_decay=table.weight_decay, fused=True)
    num_tokens = sum(batch[:, 1:].numel() for batch in batches)

    def step() -> float:
        loss = 0.0
        for batch in batches:
            tokens = batch.long()
            logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
            one = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
            (one / num_tokens).backward()
            loss += one.item()
        torch.nn.utils.clip_grad_norm_(trained, table.clip_norm)
        adamw.step()
        adamw.zero_grad(set_to_none=False)
        return loss / num_tokens

    return step


def measure(size: Size, *, rank: int, turns: int) -> dict[str, Any]:
    """Seconds of each way by turn, the ratios, and bytes."""
    torch.set_num_threads(1)
    runs = {"full": run_of(size, None, rank), "fp32": run_of(size, "fp32", rank), "nf4": run_of(size, "nf4", rank)}
    batches = size.batches()
    replicas = {name: Replica(run, batches, _DEVICE) for name, run in runs.items()}
    ways: dict[str, Step] = {**replicas, "peft": plain(runs["fp32"], batches)}
    seconds = in_turns({name: partial(timed, step, _DEVICE) for name, step in ways.items()}, turns)
    forms = {name: replica.body.canonical for name, replica in replicas.items()}
    return {
        "seconds": seconds,
        "lora_over_full": ratio(seconds["fp32"], seconds["full"]),
        "nf4_over_fp32": ratio(seconds["nf4"], seconds["fp32"]),
        "tokens_over_peft": ratio(seconds["peft"], seconds["fp32"]),
        "parameters": {name: form.num_elements for name, form in forms.items()},
        "aggregate_bytes": {"full": 4 * forms["full"].num_elements, "lora": 8 * forms["fp32"].num_elements},
        "snapshot_bytes": {"full": forms["full"].layout.num_bytes, "lora": forms["fp32"].layout.num_bytes},
    }


def main() -> None:
    """Measure, print, write JSON if asked."""
    parser = Benchmark(__doc__, quick="a tiny stage, two turns: that it runs, not how fast")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--rank", type=int, default=16, metavar="R")
    asked = parser.asked()
    found = measure(SMALL if asked.quick else CPU, rank=asked.rank, turns=2 if asked.quick else asked.turns)
    print(f"a LoRA step / a step of all weights  {found['lora_over_full']:.2f}")
    print(f"frozen weights in 4 bits / in fp32   {found['nf4_over_fp32']:.2f}")
    print(f"tokens/s, ours / a plain PEFT loop   {found['tokens_over_peft']:.2f}")
    for what in ("parameters", "aggregate_bytes", "snapshot_bytes"):
        print(f"{what:36} " + ", ".join(f"{name} {number:,}" for name, number in found[what].items()))
    write(asked.json, found)


if __name__ == "__main__":
    main()
