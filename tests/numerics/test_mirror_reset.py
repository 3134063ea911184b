"""A stage on ranks whose run begins with a checkpoint, and goes back to it when it is no longer there."""

from __future__ import annotations

import pytest
import torch
from no_ranks import NoRanks
from stage_chain import tiny

from swarmnet.errors import UsageError
from swarmnet.ranks.host_copies import HostCopies, copied
from swarmnet.stage.canonical import Canonical
from swarmnet.stage.state import State


def test_nothing_changes_if_the_checkpoint_cannot_be_read_any_more() -> None:
    canonical = Canonical.of(tiny(1).of_stage(0))
    there = [True]

    def initial() -> dict[str, torch.Tensor]:
        if not there[0]:
            raise UsageError("hf: cannot be read: it was moved")
        return {name: torch.full(shape, 0.25) for name, shape in canonical.shapes.items()}

    layout = copied(canonical)
    memory = {"copy0": layout.memory(), "copy1": layout.memory()}
    holder = HostCopies(canonical, NoRanks(), memory)  # type: ignore[arg-type]
    state = State(canonical, holder, torch.zeros(1, 1), initial)
    state.reset_to_seed()
    trained = {name: torch.full(shape, 0.5) for name, shape in canonical.state_shapes.items()}
    state.take_over(trained, version=3)
    there[0] = False
    with pytest.raises(UsageError, match="moved"):
        state.reset_to_seed()
    assert state.version == 3 and all(bool((weights == 0.5).all()) for weights in state.newest)
    there[0] = True
    state.reset_to_seed()
    assert state.version == 0 and all(bool((weights == 0.25).all()) for weights in state.newest)
