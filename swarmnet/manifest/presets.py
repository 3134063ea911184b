"""Models by name (`--preset`): the shape of a public model, and training that suits it.

The lowest layer of a new manifest: whatever is typed wins. `init` without a preset writes the toy. Plain data, so that
`--help` needs no schema. The vocabulary is the tokenizer's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Name = Literal["toy", "100m", "350m", "1b", "3b", "8b"]


@dataclass(frozen=True, slots=True)
class Preset:
    """A model. Training: arXiv:2005.14165, table 2.1, for learning rate, tokens in a step and the warm-up's 375M
    tokens; twenty tokens a parameter in all (arXiv:2203.15556)."""

    like: str
    """The model with this shape."""
    vocabulary: int
    """Of that model, for which `memory_gib` holds."""
    memory_gib: float
    """Of the GPU that serves the largest stage, with one microbatch in flight (`swarmnet plan`)."""
    model: tuple[int, int, int, int, int, int, float]
    """Hidden size, intermediate size, layers, heads, key and value heads, width of a head, base of the rotation."""
    stages: int
    steps: int
    step: tuple[int, int, int]
    """Microbatches, sequences of one, tokens of a sequence."""
    learning_rate: float
    warmup_steps: int

    def fields(self, total_steps: object = None) -> dict[str, object]:
        """Fields of the manifest by their dotted names. total_steps: if other than `steps`."""
        names = (
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "rope_theta",
        )
        steps = total_steps if isinstance(total_steps, int) else self.steps
        return {
            **{f"model.{name}": value for name, value in zip(names, self.model, strict=True)},
            "cut.stages": self.stages,
            "training.total_steps": steps,
            **dict(
                zip(
                    ("training.microbatches", "training.microbatch_size", "training.sequence_length"),
                    self.step,
                    strict=True,
                )
            ),
            "optimizer.learning_rate": self.learning_rate,
            # A short run would end before the peak.
            "optimizer.warmup_steps": min(self.warmup_steps, max(steps // 10, 1)),
        }


TOY: Mapping[str, object] = {"model.num_heads": 8, "model.num_kv_heads": 4, "model.head_dim": 16}
"""What the smallest model has otherwise than the schema's default: as many parameters, and heads for eight GPUs."""

PRESETS: Mapping[str, Preset] = {
    "100m": Preset("SmolLM-135M", 49152, 7.2, (576, 1536, 30, 9, 3, 64, 1e4), 2, 5_000, (256, 2, 1024), 6e-4, 500),
    "350m": Preset("SmolLM-360M", 49152, 7.8, (960, 2560, 32, 15, 5, 64, 1e4), 4, 14_000, (256, 2, 1024), 3e-4, 700),
    "1b": Preset("Llama-3.2-1B", 128256, 22.5, (2048, 8192, 16, 32, 8, 64, 5e5), 4, 24_000, (512, 1, 2048), 2e-4, 350),
    "3b": Preset(
        "Llama-3.2-3B", 128256, 24.4, (3072, 8192, 28, 24, 8, 128, 5e5), 8, 61_000, (512, 1, 2048), 1.6e-4, 350
    ),
    "8b": Preset(
        "Llama-3.1-8B", 128256, 31.7, (4096, 14336, 32, 32, 8, 128, 5e5), 16, 76_000, (1024, 1, 2048), 1.2e-4, 180
    ),
}

HELP = "a model by name, with training that suits it: toy (1.2M parameters, to try things), " + ", ".join(
    f"{name} ({each.like}: {each.stages} stages, of up to {each.memory_gib} GiB of a GPU)"
    for name, each in PRESETS.items()
)
"""Of the option; docs/manifest.md has what is counted."""


def preset_fields(name: str, total_steps: object = None) -> dict[str, object]:
    """The fields of that preset by their dotted names, for a run of so many steps if they were said."""
    return dict(TOY) if name == "toy" else PRESETS[name].fields(total_steps)
