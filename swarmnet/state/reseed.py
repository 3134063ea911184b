"""Make a lost stage anew from the stages beside it: a last resort, and not exact (CheckFree, arXiv:2506.15461).

Layers of a trained decoder resemble their neighbours, so the mean of the layer before and the layer after is a far
better beginning than noise, and training repairs the rest. The paper weights the two by their squared gradient norms;
here it is the plain mean, which every replica that makes the same stage computes to the same bits. A stage at the edge
has one neighbour and takes a copy. What no neighbour has (embedding, final norm, head) is what it was at version 0,
from the checkpoint that the run began with or drawn from its seed, and the optimizer begins without moments. Where the
weights of the version before are kept too, they are the same.

Knows no peers: neighbours' snapshots in, a snapshot out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from swarmnet.manifest.schema import Manifest
from swarmnet.model.cut import cut_layers
from swarmnet.model.decoder import StageModule
from swarmnet.model.initial import draw
from swarmnet.stage import snapshot
from swarmnet.stage.optimizer import MOMENTS

_LAYER = re.compile(r"model\.layers\.([0-9]+)\.(.+)")


def reseed(
    manifest: Manifest,
    stage: int,
    *,
    version: int,
    before: bytes | memoryview | None,
    after: bytes | memoryview | None,
    initial: Mapping[str, Tensor] | None = None,
) -> memoryview:
    """A snapshot of (stage, version) made from the snapshots of stage - 1 and stage + 1 at the same version.

    before, after: None where there is no such stage, or nobody has it; with neither, everything is as at version 0.
    initial: what the stage began with, in a run that began with a checkpoint which is here; None: the seed's draw.
    Raises BadMessage if one is not what it should be.
    """
    beside = [
        _layers(manifest, near, data, version)
        for near, data in ((stage - 1, before), (stage + 1, after))
        if data is not None
    ]
    shapes = _shapes(manifest, stage)
    own = sorted({int(match[1]) for match in map(_LAYER.fullmatch, shapes) if match})
    tensors: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        match = _LAYER.fullmatch(name)
        place = own.index(int(match[1])) if match else 0
        near = [layers[counterpart(place, len(own), len(layers))][match[2]] for layers in beside if match and layers]
        if near:
            tensors[name] = _mean(near)
        elif initial is not None:
            tensors[name] = initial[name]
        else:
            tensors[name] = draw(name, shape, manifest.model, seed=manifest.training.seed)
        for moment in MOMENTS:
            tensors[snapshot.moment_name(moment, name)] = torch.zeros(shape)
        if manifest.averaging.delay.most:
            tensors[snapshot.previous_name(name)] = tensors[name]
        if manifest.averaging.sync == "local":
            tensors[snapshot.slow_name(name)] = tensors[name]
            tensors[snapshot.outer_momentum_name(name)] = torch.zeros(shape)
    return snapshot.pack(tensors, stage=stage, version=version)


def counterpart(place: int, count: int, others: int) -> int:
    """Which of `others` layers lies where layer `place` of `count` does: equal counts correspond one to one."""
    return (2 * place + 1) * others // (2 * count)


def _mean(near: list[Tensor]) -> Tensor:
    return near[0] if len(near) == 1 else (near[0] + near[1]) / 2


def _layers(manifest: Manifest, stage: int, data: bytes | memoryview, version: int) -> list[Mapping[str, Tensor]]:
    """The layers of a neighbour's snapshot, in order, each as its parameters by their names inside the layer."""
    shapes = _shapes(manifest, stage)
    moments = {snapshot.moment_name(moment, name): shape for name, shape in shapes.items() for moment in MOMENTS}
    earlier = {snapshot.previous_name(name): shape for name, shape in shapes.items() if manifest.averaging.delay.most}
    outer = {
        of(name): shape
        for name, shape in shapes.items()
        for of in (snapshot.slow_name, snapshot.outer_momentum_name)
        if manifest.averaging.sync == "local"
    }
    tensors = snapshot.unpack(data, shapes | moments | earlier | outer, stage=stage, version=version)
    layers: dict[int, dict[str, Tensor]] = {}
    for name in shapes:
        if match := _LAYER.fullmatch(name):
            layers.setdefault(int(match[1]), {})[match[2]] = tensors[name]
    return [layers[number] for number in sorted(layers)]


def _shapes(manifest: Manifest, stage: int) -> dict[str, torch.Size]:
    """The parameters of a stage; no memory is taken for them."""
    ranges = cut_layers(manifest.model, manifest.cut, manifest.training.sequence_length)
    with torch.device("meta"):
        module = StageModule(manifest.model, ranges[stage], first=stage == 0, last=stage == len(ranges) - 1)
    return {name: parameter.shape for name, parameter in module.named_parameters()}
