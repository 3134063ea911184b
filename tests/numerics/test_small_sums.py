"""`averaging.codec = "small"`: state, meshes and overlapping steps."""

import pytest
import torch
from mesh_training import CPU, MICROBATCHES, Rank, layout_of, run_of, train_alone
from stage_chain import compute_thread

from swarmnet.ids import PeerId
from swarmnet.messages import Packed
from swarmnet.peer.engines import torch_engine
from swarmnet.ranks.device_backend import DeviceBackend
from swarmnet.stage.interfaces import Contribution
from swarmnet.stage.rounding import LIMIT, Roundings, SmallRounding
from swarmnet.sums import step_sum
from swarmnet.wire import codecs
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


@pytest.mark.parametrize("mode", ["small", "deterministic"])
async def test_the_sum_of_one_contribution_is_made_without_decoding_it_and_has_its_bits(mode, monkeypatch):
    async with compute_thread() as compute:
        manifest = run_of(mode)
        sums = torch_engine(manifest, 0, compute, DeviceBackend(manifest.of_stage(0), device=CPU)).sums
        size = sums.num_elements
        held = sums._accumulator.read(0)
        held.copy_(torch.arange(size) * 37 % 4001 - 2000)
        mine = await sums.contribution(0, size)
        # The same bytes from elsewhere are decoded, checked and summed.
        others = Packed(mine.codec, mine.shape, bytes(mine.data))
        expected = await sums.reduce([Contribution(PeerId("other"), 1, others)], 0, size)
        # And so are mine beside somebody else's.
        both = await sums.reduce([Contribution(PeerId(name), 1, mine) for name in ("me", "other")], 0, size)
        assert torch.equal(codecs.decode(both.packed), 2 * held)
        monkeypatch.setattr(step_sum, "integer_sum", None)
        found = await sums.reduce([Contribution(PeerId("me"), 1, mine)], 0, size)
        assert (found.packed.codec, bytes(found.packed.data)) == (expected.packed.codec, bytes(expected.packed.data))


MESHES = [(1, 2, "dp"), (1, 4, "zero1"), (1, 2, "zero2"), (2, 1, "none"), (2, 2, "dp"), (4, 2, "zero2")]


@pytest.mark.parametrize(("tensor", "data", "shard"), MESHES)
def test_ranks_sum_the_same_integers_but_where_rounding_tips_them(tensor, data, shard):
    manifest, layout = run_of("small"), layout_of(tensor, data, shard)
    before = train_alone(manifest, steps=1).state
    expected = train_alone(manifest, start=1, steps=1)
    memory = roundings_of(manifest, before, 1)._memory

    def own(data_comm, tensor_comm):
        rank = Rank(manifest, 0, layout, data=data_comm, tensor=tensor_comm)
        rank.stage.scales.copy_(memory)
        rank.stage.read_state(1, before)
        return rank.train(start=1, steps=1, rounding=roundings_of(manifest, before, 1).of(1))

    for found in run_mesh(layout.data, layout.tensor, own):
        apart = (found.total - expected.total).abs()
        assert int(apart.max()) <= 1 and float((apart > 0).double().mean()) < 0.002
        for name, tensor_found in found.state.items():
            if not name.startswith(("grid.", "optimizer.")):
                assert torch.allclose(tensor_found, expected.state[name], atol=1e-4), name
