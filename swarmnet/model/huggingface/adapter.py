"""Adapters as PEFT's files: `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import safetensors.torch
from torch import Tensor

from swarmnet.manifest.schema import LINEAR, Lora
from swarmnet.model.huggingface.write import TEXT_FILES, new_folder

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_PREFIX = "base_model.model."
"""Of a parameter's name in PEFT's files: what it wraps."""


def write_adapter(
    target: Path, lora: Lora, stages: Iterable[Mapping[str, Tensor]], *, base: str, like: Path | None = None
) -> list[str]:
    """Write the adapters of all stages to the new folder `target`, as `PeftModel.from_pretrained` loads it.

    Args:
        base: name or folder of the model that they belong to.
        like: the checkpoint with the text files to copy.

    Returns the names of the files. Raises UsageError: `target` exists, or cannot be written.
    """
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": lora.r,
        "lora_alpha": lora.lora_alpha,
        "use_rslora": lora.use_rslora,
        "target_modules": sorted(LINEAR if lora.target_modules == "all-linear" else lora.target_modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
    }
    with new_folder(target) as folder:
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        tensors = {_PREFIX + name: tensor.contiguous() for stage in stages for name, tensor in stage.items()}
        safetensors.torch.save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        shutil.copymode(folder / CONFIG, folder / WEIGHTS)  # the library makes it unreadable for other users
        for path in (like / name for name in TEXT_FILES if like is not None):
            if path.is_file():
                shutil.copyfile(path, folder / path.name)
    return sorted(path.name for path in target.iterdir())
