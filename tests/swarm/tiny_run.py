"""The smallest run that real peers serve in a blink, as a manifest and as a file."""

from __future__ import annotations

from pathlib import Path

from swarmnet.local.prepare import with_data
from swarmnet.manifest.file import to_toml
from swarmnet.manifest.schema import Cut, Data, Manifest, Model, Protocol, Training


def write_tiny_run(
    folder: Path,
    *,
    stages: int = 1,
    steps: int = 1000,
    microbatches: int = 2,
    protocol: Protocol = Protocol(),  # noqa: B008  (frozen)
) -> Path:
    """run.toml in `folder`: two layers, 16 wide, on the small corpus; nothing is evaluated."""
    manifest = with_data(
        Manifest(
            model=Model(
                vocab_size=256,
                hidden_size=16,
                intermediate_size=32,
                num_layers=2,
                num_heads=2,
                num_kv_heads=1,
                head_dim=8,
            ),
            cut=Cut(stages=stages),
            data=Data(source="corpus:small"),
            protocol=protocol,
            training=Training(
                total_steps=steps, microbatches=microbatches, microbatch_size=1, sequence_length=16, eval_every=0
            ),
        ),
        base=Path(),
    )
    path = folder / "run.toml"
    path.write_text(to_toml(manifest), encoding="utf-8")
    return path
