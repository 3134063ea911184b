"""`averaging.codec = "small"`: state, meshes and overlapping steps."""

import pytest
import torch
from mesh_training import CPU, MICROBATCHES, Rank, layout_of, run_of, train_alone

from swarmnet.ranks.device_backend import DeviceBackend
from swarmnet.stage.rounding import LIMIT, Roundings, SmallRounding
from tests.contracts.thread_comm import run_mesh


def roundings_of(manifest, state, version):
    """As of a replica that has taken that state over."""
    body = DeviceBackend(manifest.of_stage(0), device=CPU)
    body.state.take_over(state, version=version)
    canonical = body.state.canonical
    return Roundings(
        manifest.numerics,
        manifest.averaging,
        canonical.shapes,
        terms=MICROBATCHES,
        memory=body.state._roundings._memory,
    )


@pytest.mark.parametrize("sync", ["exact", "overlap"])
def test_a_state_goes_on_as_where_it_came_from_from_any_version(sync):
    manifest = run_of("small", sync=sync)
    whole = train_alone(manifest, steps=6)
    assert any(name.startswith("grid.") for name in whole.state)
    for start in range(1, 6):
        found = train_alone(manifest, start=start, steps=6 - start)
        assert torch.equal(found.total, whole.total), start
        for name, tensor in whole.state.items():
            assert torch.equal(found.state[name], tensor), (start, name)


def test_after_the_first_step_sums_are_small_and_stand_for_the_gradients_sum():
    small, fine = (train_alone(run_of(mode), steps=2) for mode in ("small", "deterministic"))
    assert int(small.total.abs().max()) <= LIMIT * MICROBATCHES
    before = train_alone(run_of("small"), steps=1)
    rounding = roundings_of(run_of("small"), before.state, 1).of(1)
    assert isinstance(rounding, SmallRounding)
    canonical = DeviceBackend(run_of("small").of_stage(0), device=CPU).state.canonical
    values = torch.cat(
        [each for place, piece in enumerate(canonical.pieces(small.total)) for each in rounding.values(piece, place)]
    )
    exact = fine.total.double() * 2.0**-32
    error = float((values - exact).square().sum() / exact.square().sum())
    assert error < 0.1, error


MESHES = [(1, 2, "dp"), (1, 4, "zero1"), (1, 2, "zero2"), (2, 1, "none"), (2, 2, "dp"), (4, 2, "zero2")]


@pytest.mark.parametrize(("tensor", "data", "shard"), MESHES)
def test_ranks_sum_the_same_integers_but_where_rounding_tips_them(tensor, data, shard):
    manifest, layout = run_of("small"), layout_of(tensor, data, shard)
    before = train_alone(manifest, steps=1).state
    expected = train_alone(manifest, start=1, steps=1)
    memory = roundings_of(manifest, before, 1)._memory

    def own(data_comm, tensor_comm):
        rank = Rank(manifest, 0, layout, data=data_comm, tensor=tensor_comm)
        rank.stage.round_by(memory)
        rank.stage.read_state(1, before)
        return rank.train(start=1, steps=1, rounding=roundings_of(manifest, before, 1).of(1))

    for found in run_mesh(layout.data, layout.tensor, own):
        apart = (found.total - expected.total).abs()
        assert int(apart.max()) <= 1 and float((apart > 0).double().mean()) < 0.002
        for name, tensor_found in found.state.items():
            if not name.startswith(("grid.", "optimizer.")):
                assert torch.allclose(tensor_found, expected.state[name], atol=1e-4), name
