"""Weights of version 0 that come from a checkpoint: read stage by stage, and held against the manifest's digests.

`initial.source` is a hint and may be wrong; the digests say which weights the run begins with, whoever brings them.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from swarmnet.errors import UsageError
from swarmnet.manifest.schema import Manifest
from swarmnet.model.decoder import StageModule
from swarmnet.model.huggingface.checkpoint import Checkpoint, Shapes, digest, stage_shapes


def shapes_of(manifest: Manifest) -> list[Shapes]:
    """Each stage's parameters."""
    return list(stage_shapes(manifest.model, manifest.cut, manifest.training.sequence_length))


def stage_weights(manifest: Manifest, stage: int, folder: Path) -> dict[str, Tensor]:
    """What `stage` begins with, by name: fp32, on the CPU. Reads no other stage's tensors.

    Raises UsageError: not in `folder`, or not the weights the manifest names.
    """
    tensors = Checkpoint(folder).read(shapes_of(manifest)[stage])
    found, agreed = digest(tensors), manifest.initial.sha256[stage]
    if found != agreed:
        raise UsageError(
            f"{folder}: the weights of stage {stage} have digest {found[:12]} here, {agreed[:12]} in the "
            "manifest: this is not the checkpoint the run begins with, or the run is cut elsewhere"
        )
    return tensors


def digests(manifest: Manifest, folder: Path, *, may_lack_head: bool, may_differ_head: bool) -> list[str]:
    """What the manifest has to say of the checkpoint in `folder`: one digest a stage.

    may_lack_head, may_differ_head: as of `Checkpoint.check_head`.
    Raises UsageError: tensors are missing, do not fit the model, or the model leaves some unread.
    """
    checkpoint, stages = Checkpoint(folder), shapes_of(manifest)
    checkpoint.check_head(stages[0], may_lack=may_lack_head, may_differ=may_differ_head)
    if strange := checkpoint.beyond(stages):
        raise UsageError(
            f"{folder}: holds tensors that the model has no use for ({', '.join(strange[:3])}"
            f"{', ...' if len(strange) > 3 else ''}): it is not of the kind its config.json says"
        )
    return [digest(checkpoint.read(shapes)) for shapes in stages]


@torch.no_grad()
def begin(module: StageModule, manifest: Manifest, *, base: Path = Path()) -> None:
    """Give the whole model its weights of version 0, wherever they come from. base: of a relative `initial.source`."""
    if not manifest.initial.sha256:
        module.reset(seed=manifest.training.seed)
        return
    parameters = dict(module.named_parameters())
    for stage in range(manifest.cut.stages):
        for name, tensor in stage_weights(manifest, stage, base / manifest.initial.source).items():
            parameters[name].copy_(tensor)
