"""What a step costs, and the choice that follows: laws of the formulas, and figures that were measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from swarmnet.config.fleet import Members
from swarmnet.errors import UsageError
from swarmnet.manifest.codec_names import BOUNDARY
from swarmnet.manifest.file import override
from swarmnet.manifest.schema import Cut, Manifest, Model, StageSpec, Training
from swarmnet.plan.choice import Priced, search
from swarmnet.plan.cost import (
    BYTES,
    ROUND_TRIPS,
    Load,
    Site,
    Way,
    cost,
    hiding_bytes_per_s,
    limits,
    rule_bubble,
    sum_bytes,
    volumes,
)
from swarmnet.plan.members import situated
from swarmnet.wire.codec import MAX_BLOCK
from swarmnet.wire.codecs import encode, encoded_bytes

MBIT = 1e6 / 8
LOAD = Load(stages=4, replicas=4, microbatches=32, microbatch_s=0.6, boundary_elements=1 << 22, parameters=10**9)
SITE = Site(bytes_per_s=200 * MBIT, flops_per_s=30e12)
WAY = Way("int8", "nf4", "small", "exact", slots=8)


@pytest.mark.parametrize("codec", BOUNDARY)
def test_an_element_takes_the_bytes_that_its_codec_says(codec: str) -> None:
    assert BYTES[codec] == pytest.approx(encoded_bytes(codec, (MAX_BLOCK,)) / MAX_BLOCK, abs=0.001)


def members_of(site: Site) -> Members:
    mbit, tflops = site.bytes_per_s / MBIT, site.flops_per_s / 1e12
    return Members.alike(1, mbit=mbit, tflops=tflops, round_trip_s=site.round_trip_s)


def load_of(spec: StageSpec, site: Site, *, replicas: int) -> Load:
    found = situated(spec, members_of(site), WAY, counts=((replicas,),) * spec.cut.stages)
    assert found is not None
    return found.load


def choose(spec: StageSpec, said: dict[str, object], site: Site, *, replicas: int) -> tuple[Priced, tuple[Priced, ...]]:
    return search(spec, said, members_of(site), counts=((replicas,),) * spec.cut.stages)


@pytest.mark.parametrize(
    ("microbatches", "replicas", "measured"),
    [(8, 2, 1.15), (8, 4, 1.08), (8, 16, 0.82), (32, 2, 1.39), (32, 4, 1.31), (32, 16, 1.17)],
)
def test_small_sums_are_as_long_as_measured(microbatches: int, replicas: int, measured: float) -> None:
    assert sum(sum_bytes("small", microbatches, replicas)) == pytest.approx(measured, rel=0.03)


def test_sparse_sums_are_as_long_as_their_codec_says() -> None:
    size, seeded = 1 << 20, torch.Generator().manual_seed(0)
    each = [torch.where(torch.rand(size, generator=seeded) < 0.05, 1.0, 0.0) for _ in range(4)]
    found = [encode("sparse", x).num_bytes / size for x in (each[0], sum(each, torch.zeros(size)))]
    assert sum_bytes("sparse:0.05", 8, 4) == pytest.approx(found, rel=0.02)
    assert encode("sparse:0.05", torch.randn(size, generator=seeded)).num_bytes / size == pytest.approx(
        found[0], rel=0.01
    )


def test_a_round_sends_what_a_butterfly_must() -> None:
    found = cost(LOAD, SITE, replace(WAY, codec="int8"))
    assert found.averaging_bytes == pytest.approx(3 / 4 * 2.032e9)
    assert found.averaging_s == pytest.approx(found.averaging_bytes / SITE.bytes_per_s)
    assert cost(replace(LOAD, replicas=1), SITE, WAY).averaging_s == 0.0


def test_on_a_fast_line_the_codec_is_what_takes_time() -> None:
    fast = replace(SITE, bytes_per_s=1e10)
    small, faster = (cost(LOAD, site, WAY).averaging_s for site in (fast, replace(fast, bytes_per_s=1e11)))
    assert small == faster < cost(LOAD, SITE, WAY).averaging_s


def test_nothing_is_faster_than_its_compute_and_less_work_is_never_slower() -> None:
    for sync in ("exact", "overlap", "local"):
        way = replace(WAY, sync=sync, inner_steps=20 if sync == "local" else 1)
        found = cost(LOAD, SITE, way)
        assert found.compute_s == pytest.approx(8 * 0.6) and 0 < found.utilisation < 1
        assert cost(LOAD, replace(SITE, bytes_per_s=2 * SITE.bytes_per_s), way).step_s <= found.step_s
        assert cost(replace(LOAD, microbatch_s=0.3), SITE, way).step_s <= found.step_s
        assert cost(LOAD, SITE, replace(way, slots=2)).step_s >= found.step_s


def test_the_terms_of_a_step_add_up_and_none_is_longer_than_the_step() -> None:
    """Also where steps overlap: what the next step's compute hides is no wait."""
    for sync in ("exact", "overlap", "local"):
        way = replace(WAY, sync=sync, inner_steps=20 if sync == "local" else 1)
        for site in (SITE, replace(SITE, bytes_per_s=1e10), replace(SITE, round_trip_s=0.4)):
            found = cost(LOAD, site, way)
            assert all(0 <= wait < found.step_s for wait in found.waits.values())
            assert found.compute_s + sum(found.waits.values()) == pytest.approx(found.step_s)
    exact, overlap = (cost(LOAD, SITE, replace(WAY, sync=sync)) for sync in ("exact", "overlap"))
    left = overlap.averaging_s / exact.averaging_s
    assert left < 0.9 and overlap.bubble_s == pytest.approx(left * exact.bubble_s)
    often, seldom = (cost(LOAD, SITE, replace(WAY, sync="local", inner_steps=steps)) for steps in (1, 20))
    assert seldom.averaging_s == pytest.approx(often.averaging_s / 20)
    assert seldom.averaging_bytes == pytest.approx(often.averaging_bytes / 20)


def test_a_round_waits_for_the_narrowest_line_and_a_barrier_for_the_farthest_member() -> None:
    near = cost(LOAD, SITE, WAY)
    narrow = cost(LOAD, replace(SITE, narrowest_bytes_per_s=SITE.bytes_per_s / 8), WAY)
    assert narrow.averaging_s == pytest.approx(8 * 3 / 4 * sum_bytes("small", 32, 4)[1] * 1e9 / SITE.bytes_per_s)
    assert narrow.averaging_s > near.averaging_s and narrow.boundary_s == near.boundary_s
    far = cost(LOAD, replace(SITE, farthest_s=1.0), WAY)
    assert far.barrier_s == pytest.approx(ROUND_TRIPS * 1.0) and near.barrier_s == pytest.approx(ROUND_TRIPS * 0.05)


def test_what_limits_is_what_doubled_makes_a_step_shortest() -> None:
    slow_line, slow_devices = replace(SITE, bytes_per_s=1e6), replace(LOAD, microbatch_s=100.0)
    for load, site, what in ((LOAD, slow_line, "line"), (slow_devices, SITE, "devices")):
        twice = limits(load, site, WAY)
        assert min(twice, key=twice.__getitem__) == what and max(twice.values()) <= cost(load, site, WAY).step_s


def test_a_step_with_fewer_slots_than_are_enough_is_limited_by_memory() -> None:
    """More of anything else brings no more slots."""
    fast = replace(SITE, bytes_per_s=1e10)
    few, enough = replace(WAY, slots=1), replace(WAY, slots=cost(LOAD, fast, WAY).slots)
    twice = limits(LOAD, fast, few)
    assert min(twice, key=twice.__getitem__) == "memory" and twice["memory"] == cost(LOAD, fast, enough).step_s
    assert twice["line"] == cost(LOAD, replace(fast, bytes_per_s=2e10), few).step_s
    assert limits(LOAD, fast, enough)["memory"] == cost(LOAD, fast, enough).step_s


def test_half_the_latency_is_half_of_every_round_trip() -> None:
    far = replace(SITE, bytes_per_s=1e10, round_trip_s=2.0, farthest_s=3.0)
    way = replace(WAY, slots=cost(LOAD, far, WAY).slots)
    nearer = replace(far, round_trip_s=1.0, farthest_s=1.5)
    assert limits(LOAD, far, way)["latency"] == cost(LOAD, nearer, way).step_s
    twice = limits(LOAD, far, way)
    assert min(twice, key=twice.__getitem__) == "latency"


def test_of_twice_the_width_a_stage_needs_half_the_line() -> None:
    wide = replace(LOAD, boundary_elements=2 * LOAD.boundary_elements, microbatch_s=4 * LOAD.microbatch_s)
    assert hiding_bytes_per_s(wide, WAY) == pytest.approx(hiding_bytes_per_s(LOAD, WAY) / 2)
    # 2^22 elements at 1.016 and 0.563 bytes in 0.6 s, on three quarters of a line.
    assert hiding_bytes_per_s(LOAD, WAY) == pytest.approx((1 << 22) * 1.579 / 0.6 / 0.75)


def test_the_rule_of_bubbles_is_of_a_whole_step() -> None:
    assert rule_bubble(4, 8) == pytest.approx(3 / 11)  # 27 %, not 8
    assert rule_bubble(4, 8, 2) == pytest.approx(1 / 17)
    assert rule_bubble(1, 8) == 0


def test_techniques_send_what_is_known_of_them() -> None:
    sent = volumes(LOAD, layers=10, inner_steps=50)
    assert sent["data parallel"] == sent["ZeRO-1"] == sent["ZeRO-2"] == pytest.approx(2 * 3 / 4 * 4e9)
    assert sent["ZeRO-3"] == pytest.approx(8 * 3 * 3 / 4 * 4e9), "for each of 8 microbatches"
    assert sent["tensor parallel"] == sent["sequence parallel"] == pytest.approx(10 * 4 * 32 * 1.5 * 4 * (1 << 22))
    assert sent["pipeline"] == 8 * 2 * 4 * (1 << 22) and sent["local"] == sent["data parallel"] / 50
    assert sent["local, pairs"] == 4e9 / 50
    assert set(volumes(replace(LOAD, replicas=1), 10, 50).values()) == {0.0, sent["pipeline"] * 4}


def test_slots_for_each_stage_and_for_what_latency_takes() -> None:
    near = replace(SITE, round_trip_s=1e-6, bytes_per_s=1e15)
    assert cost(replace(LOAD, stages=12, microbatches=400), near, WAY).slots == 3 * 8 + 2 + 1
    far = cost(replace(LOAD, stages=12, microbatches=400), replace(near, round_trip_s=0.2), WAY).slots
    assert far == 3 * (8 + 6) + 2 + 1, "12 x 1.5 round trips of a third of a microbatch each"


def test_a_stage_is_as_large_and_as_slow_as_the_heaviest() -> None:
    manifest = Manifest(cut=Cut(stages=2), model=Model(num_layers=4, vocab_size=50_000))
    load = load_of(manifest.of_stage(0), SITE, replicas=2)
    whole = manifest.model.num_parameters
    assert whole / 2 < load.parameters < whole and load.stages == 2
    assert load.boundary_elements == 4 * 64 * 128
    once = load_of(override(manifest, ["cut.stages=1"]).of_stage(0), SITE, replicas=2)
    assert once.parameters == pytest.approx(whole, rel=1e-3)
    # Six FLOPs for each parameter and token, but for embeddings and attention.
    assert once.microbatch_s == pytest.approx(6 * (whole - 50_000 * 128) * 256 / SITE.flops_per_s, rel=0.1)


LARGE = Manifest(
    model=Model(hidden_size=2048, intermediate_size=5632, num_layers=48, num_heads=32, num_kv_heads=8, head_dim=64),
    training=Training(total_steps=2000, microbatches=64, microbatch_size=4, sequence_length=2048),
)


def test_the_narrower_the_line_the_less_is_sent() -> None:
    codecs = []
    for mbit in (50_000, 20, 1):
        best, compared = choose(
            LARGE.of_stage(0), {"averaging.sync": "exact"}, replace(SITE, bytes_per_s=mbit * MBIT), replicas=4
        )
        assert best in compared and {each.way.codec for each in compared} == {"small"}
        codecs.append((best.way.activations, best.way.codec))
    assert codecs == [("fp32", "small"), ("int8", "small"), ("int8", "small")]
    best, compared = choose(LARGE.of_stage(0), {}, replace(SITE, bytes_per_s=20 * MBIT), replicas=4)
    assert (best.way.sync, best.way.codec) == ("local", "int8")
    assert best.fields["numerics.mode"] == "fp32" and best.seconds == min(each.seconds for each in compared)
    assert best.seconds > 1.3 * best.cost.step_s, "what it harms the loss is in the price"
    assert best.training.microbatch_size * best.training.microbatches == 4 * 64


def test_a_short_run_has_no_time_for_late_gradients() -> None:
    short = override(LARGE, ["training.total_steps=60"])
    _, compared = choose(short.of_stage(0), {}, SITE, replicas=4)
    assert {each.way.sync for each in compared} == {"exact"}
    best, _ = choose(short.of_stage(0), {"averaging.sync": "local"}, SITE, replicas=4)
    assert best.way.sync == "local", "it was said"


def test_what_was_said_is_kept() -> None:
    said = {"averaging.codec": "int64", "wire.activations": "bf16", "training.microbatch_size": 4}
    manifest = override(LARGE, ["wire.activations=bf16", "numerics.mode=fast"])
    best, compared = choose(manifest.of_stage(0), said | {"numerics.mode": "fast"}, SITE, replicas=4)
    assert {each.way.codec for each in compared} == {"int64"} and best.fields["numerics.mode"] == "fast"
    assert best.way.activations == "bf16"
    assert (best.training.microbatch_size, best.training.microbatches) == (4, 64)
    for fields, sums in (
        ({"averaging.reducer": "norm_clip"}, ("local", "int8")),
        ({"averaging.sync": "local", "averaging.partners": "pairs"}, ("local", "fp16")),
        ({"averaging.sync": "overlap"}, ("overlap", "small")),
    ):
        best, _ = choose(LARGE.of_stage(0), fields, SITE, replicas=4)
        assert (best.way.sync, best.way.codec) == sums
    with pytest.raises(UsageError, match=r'cannot tell what "acme\.half" costs'):
        choose(manifest.of_stage(0), {"averaging.codec": "acme.half", "averaging.sync": "local"}, SITE, replicas=4)
