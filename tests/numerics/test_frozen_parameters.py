"""A parameter that does not train is in no gradient, update, snapshot or layout; forward and backward read it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stage_chain import batch_of, commit, text, tiny

from swarmnet.model.decoder import StageModule
from swarmnet.ranks.device_backend import DeviceBackend
from swarmnet.ranks.layout import MeshLayout
from swarmnet.ranks.stage import RankStage
from swarmnet.stage.canonical import Canonical
from swarmnet.wire import codecs
from tests.contracts.thread_comm import ThreadComm, run_mesh

SPEC = tiny(1).of_stage(0)


@pytest.fixture(autouse=True)
def _frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The feed-forward layers of every stage are frozen."""
    made = StageModule.__init__

    def freeze(self: StageModule, *arguments: Any, **options: Any) -> None:
        made(self, *arguments, **options)
        for name, parameter in self.named_parameters():
            if ".mlp." in name:
                torch.nn.init.constant_(parameter.requires_grad_(False), 0.01)

    monkeypatch.setattr(StageModule, "__init__", freeze)


def test_a_step_of_one_device_changes_what_trains_alone() -> None:
    body, canonical = DeviceBackend(SPEC), Canonical.of(SPEC)
    body.state.reset_to_seed()
    assert canonical.shapes and not any(".mlp." in name for name in canonical.state_shapes)
    module = body._modules[0]
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    tokens = codecs.decode(batch_of(tiny(1), text(), 0, 0))
    loss, work = body.forward(0, tokens, None, train=True)
    assert work is not None and body.backward(work, None) is None
    assert body.accumulate(work, step=0, index=0, discards=0)
    total = body.sum_memory()
    body.write_sum(0, total)
    assert total.numel() == canonical.num_elements and bool(total.any())
    square = body.state.square_norm(total)
    body.state.apply(total, [commit(0, 0, b"", loss.item(), tokens[:, 1:].numel(), square)])
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, before[name]) == (".mlp." in name), name
    memory = canonical.layout.memory()
    assert body.state.copy(memory) == 1
    assert canonical.unpack(canonical.layout.seal(memory, version=1), version=1).keys() == canonical.state_shapes.keys()


@pytest.mark.parametrize(
    "layout", [MeshLayout(2, 1, devices=("cpu",) * 2), MeshLayout(1, 2, "zero2", devices=("cpu",) * 2)]
)
def test_ranks_share_what_trains_alone(layout: MeshLayout) -> None:
    """What ranks write of a sum and of a state covers the parameters that train, and these alone."""
    canonical = Canonical.of(SPEC)
    total = torch.zeros(canonical.num_elements, dtype=torch.int64)
    state = {name: torch.full(shape, torch.nan) for name, shape in canonical.state_shapes.items()}

    def body(data: ThreadComm, tensor: ThreadComm) -> int:
        stage = RankStage(SPEC, layout, tensor=tensor, data=data, device=torch.device("cpu"))
        stage.reset(canonical.initial(None))
        stage.write_state(0, state)
        stage.write_sum(0, total)
        return stage.sum_of(0).read(0).numel()

    held = run_mesh(layout.data, layout.tensor, body)
    assert not any(bool(tensor.isnan().any()) for tensor in state.values())
    assert max(held) < canonical.num_elements <= sum(held)
