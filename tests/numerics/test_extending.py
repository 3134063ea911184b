"""The codec, reducer, optimizer and architecture of docs/extending.md, in real engines."""

from __future__ import annotations

import asyncio
import importlib
import random
from pathlib import Path

import extending_page
import pytest
import torch
from stage_chain import StageChain, compute_thread, tiny

from swarmnet.errors import UsageError
from swarmnet.ids import PeerId
from swarmnet.manifest.codec_names import named_by
from swarmnet.manifest.schema import Averaging, Manifest, Wire
from swarmnet.model import decoder
from swarmnet.stage.interfaces import Contribution
from swarmnet.stage.optimizer import update_rule_of
from swarmnet.sums.reducer import float_sum, rule_of
from swarmnet.wire import codecs
from swarmnet.wire.codec_contract import check_codec


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extending_page.install(tmp_path, monkeypatch)


def train(manifest: Manifest, *, replicas: int = 1, steps: int = 6) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of some steps, and the weights after them: all replicas' are the same."""

    async def whole() -> tuple[list[float], dict[str, torch.Tensor]]:
        async with compute_thread() as compute:
            chain, rng = StageChain(manifest, compute, replicas=replicas), random.Random(1)
            losses = [await chain.step(rng, parts=replicas) for _ in range(steps)]
            weights = [await chain.weights(replica) for replica in range(replicas)]
            assert all(torch.equal(each[name], weights[0][name]) for each in weights for name in each)
            return losses, weights[0]

    return asyncio.run(whole())


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.usefixtures("acme")
def test_the_codec_keeps_the_laws_and_trains() -> None:
    check_codec("acme.half")
    exact, coarse = (
        tiny(2, mode="fp32", averaging=Averaging(sync="local", codec=codec, inner_steps=2)).model_copy(
            update={"wire": Wire(activations=codec, gradients=codec)}
        )
        for codec in ("fp32", "acme.half")
    )
    expected, losses = train(exact)[0], train(coarse)[0]
    assert losses != expected and losses == pytest.approx(expected, rel=0.01) and losses[-1] < losses[0]


@pytest.mark.usefixtures("acme")
def test_the_reducer_leaves_the_liar_out() -> None:
    rule = rule_of(Averaging(sync="local", codec="fp32", reducer="acme.quiet"))
    honest = [torch.full((8,), 1.0 + 0.1 * number) for number in range(4)]
    given = [
        Contribution(PeerId(name), 1, codecs.encode("fp32", vector))
        for name, vector in zip("abcd!", [*honest, -50.0 * honest[0]], strict=True)
    ]
    total, clipped = float_sum(rule, given, 8, codec="fp32")
    assert [each.peer for each in clipped] == ["!"]
    assert float(total.norm()) < 1.5 * float(sum(honest).norm())


@pytest.mark.usefixtures("acme")
def test_the_optimizer_gives_the_same_bits_however_stages_and_replicas_are_cut() -> None:
    swarm, single = (train(tiny(stages, name="acme.lion", learning_rate=1e-3), replicas=stages) for stages in (2, 1))
    assert same(swarm[1], single[1]) and swarm[0][-1] < swarm[0][0]
    assert not same(single[1], train(tiny(1, learning_rate=1e-3))[1])


@pytest.mark.usefixtures("acme")
def test_stages_of_the_architecture_make_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = train(tiny(1))
    monkeypatch.setattr(decoder, "layer_of", importlib.import_module("acme_swarmnet.architecture").ParallelLayer)
    swarm, single = (train(tiny(stages), replicas=stages) for stages in (2, 1))
    assert same(swarm[1], single[1]) and swarm[0][-1] < swarm[0][0]
    assert not same(single[1], usual[1])


@pytest.mark.parametrize(
    ("manifest", "line"),
    [
        (
            tiny(mode="fp32", averaging=Averaging(sync="local", codec="fp32", reducer="acme.quiet")),
            "averaging.reducer: reducer",
        ),
        (tiny(name="acme.lion"), "optimizer.name: optimizer"),
    ],
)
def test_what_is_not_installed_is_named_with_its_field(manifest: Manifest, line: str) -> None:
    lookup = rule_of if "reducer" in line else update_rule_of
    for table, check in (
        (named_by(manifest), codecs.use_all),
        (manifest.averaging if "reducer" in line else manifest.optimizer, lookup),
    ):
        with pytest.raises(UsageError, match=rf"^{line} acme\.\w+: no installed distribution has an entry point"):
            check(table)


@pytest.mark.parametrize("name", ["mean", "acme.", "Acme.mean", "acme.mean:"])
def test_names_that_are_neither_ours_nor_a_plug_ins_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="must be one of sum, norm_clip"):
        Averaging(reducer=name)
    with pytest.raises(ValueError, match=r"must be one of adamw, or a plug-in's such as acme\.mine"):
        tiny(name=name)


def test_what_is_made_for_adamw_goes_with_no_other_optimizer() -> None:
    for field in ({"lead": 1.0}, {"state": "8bit"}):
        with pytest.raises(ValueError, match="goes with lead"):
            tiny(name="acme.lion", **field)
