"""Machines given to stages, what a step then asks of the slowest, the search over it, and the memory that it takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnet.config.fleet import FleetRegions, MachineKind, Members, read_fleet
from swarmnet.errors import UsageError
from swarmnet.manifest.schema import Cut, Manifest, Model, StageSpec, Training
from swarmnet.plan.choice import Priced, search
from swarmnet.plan.cost import LayerTimes, Load, Site, Way, cost, mesh_bytes, rule_bubble, volumes, works
from swarmnet.plan.members import MachineFit, given_away, situated
from swarmnet.plan.memory import GIB, RankMemory, StageMemory, read_size, shown, together
from swarmnet.simulate.fleet import FleetFile

WAY = Way("int8", "int8", "small", "exact", 8)
RUN = Manifest(
    model=Model(hidden_size=1024, intermediate_size=2816, num_layers=16, num_heads=16, num_kv_heads=8, head_dim=64),
    cut=Cut(stages=2),
    training=Training(total_steps=60, microbatches=32, microbatch_size=4, sequence_length=1024),
)
SPEC = RUN.of_stage(0)


def fleet(*kinds: MachineKind) -> Members:
    return Members(machines=kinds)


def spec_of(stages: int) -> StageSpec:
    return SPEC.model_copy(update={"cut": Cut(stages=stages)})


Fits = tuple[tuple[MachineFit, ...], ...]


def of_places(priced: Priced, *kinds: MachineFit) -> Fits:
    return (kinds,) * (priced.cut.stages // priced.stages_per_peer)


def roomy(priced: Priced) -> Fits:
    return of_places(priced, *[MachineFit(64, 1)] * len(priced.situation.counts[0]))


def changed(spec: StageSpec, **training: int) -> StageSpec:
    return spec.model_copy(update={"training": spec.training.model_copy(update=training)})


HOME = MachineKind(name="home", count=4, tflops=20.0, gpu_gib=16.0, mbit=200.0)
LAB = MachineKind(name="lab", count=1, tflops=60.0, gpu_gib=80.0, mbit=1000.0)


def test_the_slowest_stage_is_as_fast_as_can_be() -> None:
    # Speeds 4, 2 and 2: the fast one alone in one place, the others in the other.
    assert given_away([[4.0, 2.0], [4.0, 2.0]], [1, 2]) == ((1, 0), (0, 2))
    assert given_away([[4.0, 0.0], [4.0, 2.0]], [1, 2]) == ((1, 0), (0, 2)), "the slow ones do not fit the first"
    assert given_away([[1.0], [1.0], [1.0]], [2]) is None, "fewer machines than places"
    # A place with twice the work: a machine brings half of what it brings elsewhere.
    assert given_away([[2.0], [1.0]], [3]) == ((1,), (2,))


@given(
    st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=2, max_size=2), min_size=1, max_size=5),
    st.lists(st.integers(0, 6), min_size=2, max_size=2),
)
def test_machines_are_given_once_and_where_they_fit(rates: list[list[float]], counts: list[int]) -> None:
    found = given_away(rates, counts)
    if found is None:
        return
    for kind, count in enumerate(counts):
        assert sum(place[kind] for place in found) in (0, count)
    for place, rate in zip(found, rates, strict=True):
        assert sum(place) and not any(n and not each for n, each in zip(place, rate, strict=True))


def test_unequal_replicas_share_the_work_as_they_are_fast() -> None:
    found = situated(spec_of(1), fleet(HOME, LAB), WAY)
    assert found is not None and found.counts == ((4, 1),)
    flops = works(spec_of(1))[0].flops
    assert found.load.microbatch_s == pytest.approx(5 * flops / 140e12) and found.load.replicas == 5
    assert found.load.slowest_s == pytest.approx(flops / 20e12)
    assert found.site.bytes_per_s == pytest.approx((4 * 200 + 1000) * 1e6 / 8 / 5)
    assert found.site.narrowest_bytes_per_s == pytest.approx(25e6)


def test_a_slow_line_of_a_fast_device_slows_its_stage() -> None:
    """Neither all of the compute nor all of the lines comes through: one machine waits for each."""
    fast = MachineKind(name="fast", count=1, tflops=1000.0, mbit=20.0)
    slow = MachineKind(name="slow", count=1, tflops=1.0, mbit=2000.0)
    found = situated(spec_of(2), fleet(fast, slow), WAY, counts=((1, 1),) * 2)
    assert found is not None
    flops = max(each.flops for each in works(spec_of(2)))
    crossing = 4 * 1024 * 1024 * 1.016 / 0.75
    through = 20e6 / 8 / crossing + 1e12 / flops
    joint = min(1001e12 / flops, 2020e6 / 8 / crossing)
    assert found.load.microbatch_s == pytest.approx(2 * flops / 1001e12 * joint / through, rel=1e-3)
    assert found.load.microbatch_s > 10 * found.place_s[0]


def test_two_stages_a_peer_are_twice_the_work_of_half_as_many_places() -> None:
    alone = situated(spec_of(4), fleet(HOME), WAY)
    both = situated(spec_of(4), fleet(HOME), WAY, stages_per_peer=2)
    assert alone is not None and both is not None
    assert alone.counts == ((1,),) * 4 and both.counts == ((2,),) * 2
    assert cost(both.load, both.site, WAY).compute_s == pytest.approx(cost(alone.load, alone.site, WAY).compute_s)
    assert rule_bubble(4, 16, 2) == pytest.approx(1 / 33), "(P-1)/(vM+P-1) with P = 2, v = 2"


def test_round_trips_are_those_of_pairs() -> None:
    regions = FleetRegions(names=("eu", "us"), rtt_ms=((20.0, 90.0), (90.0, 20.0)))
    kinds = (MachineKind(name="a", count=2, region="eu"), MachineKind(name="b", count=1, region="us"))
    mean, longest = Members(machines=kinds, regions=regions).round_trips([2, 1])
    # Of six ordered pairs two are inside Europe.
    assert mean == pytest.approx((2 * 20 + 4 * 90) / 6 / 1000) and longest == 0.09
    assert fleet(HOME).round_trips([1]) == (0.05, 0.05)


@given(
    st.integers(1, 6),
    st.sampled_from(["exact", "overlap", "local"]),
    st.floats(5, 2000),
    st.floats(1, 100),
    st.floats(1.0, 8.0),
)
def test_better_machines_are_never_slower(stages: int, sync: str, mbit: float, tflops: float, better: float) -> None:
    way = replace(WAY, sync=sync, inner_steps=20 if sync == "local" else 1)

    def step_s(**changes: float) -> float:
        one = MachineKind(name="one", count=6, mbit=mbit, tflops=tflops)
        other = MachineKind(name="other", count=6, mbit=mbit / 2, tflops=tflops / 3)
        kinds = (one, other.model_copy(update={name: getattr(other, name) * by for name, by in changes.items()}))
        found = situated(spec_of(stages), fleet(*kinds), way, counts=((1, 1),) * stages)
        assert found is not None
        return cost(found.load, found.site, way).step_s

    now = step_s()
    assert step_s(mbit=better) <= now * (1 + 1e-9) and step_s(tflops=better) <= now * (1 + 1e-9)


def test_peers_of_one_machine_share_its_cores() -> None:
    load = Load(2, 2, 16, 0.3, 1, 1000)
    site = Site(1e9, 1e12, 1e-4)
    shared = cost(replace(load, crowd=2.0), site, WAY)
    # 16 microbatches of two stages of 0.3 s on two cores.
    assert shared.step_s >= 16 * 2 * 0.3 / 2 and shared.step_s > 1.7 * cost(load, site, WAY).step_s


TIMES = LayerTimes(4096, 0.1, 0.0, 0.2, 0.01, 1e-9, 1e12)


def test_a_measured_head_makes_its_stage_shorter() -> None:
    assert TIMES.cut(6, 2) == (4, 2), "the head takes as long as two layers"
    assert TIMES.stages_s((4, 2)) == pytest.approx([0.01 + 0.4, 0.01 + 0.2 + 0.2])
    work = works(SPEC.model_copy(update={"cut": Cut(stages=2, layers=(9, 7))}), TIMES)
    assert [each.flops for each in work] == pytest.approx([0.91e12, 0.91e12])
    best, _ = search(SPEC, {"cut.stages": 2}, fleet(HOME, LAB), roomy, TIMES)
    assert best.cut.layers == (9, 7) and best.fields["cut.layers"] == [9, 7]


def test_what_gpus_exchange_takes_time() -> None:
    members, said = fleet(MachineKind(count=2, gpus=2, gpu_gbit=8.0)), {"cut.stages": 1, "training.microbatch_size": 1}
    looks = [lambda priced, at=at: ((MachineFit(64, 1, mesh_bytes=at),),) for at in (0.0, 3e9)]
    free, priced = (search(spec_of(1), said, members, look)[0].situation for look in looks)
    assert priced.place_s[0] == pytest.approx(free.place_s[0] + 3.0), "3e9 bytes at 8 Gbit/s"
    assert priced.load.microbatch_s == pytest.approx(free.load.microbatch_s + 3.0)
    sizes = {"tensor": 1, "data": 4, "parameters": 1000, "layers": 2, "boundary_elements": 100}
    assert mesh_bytes("zero1", **sizes) == 0
    assert mesh_bytes("zero3", **sizes) == 3 * mesh_bytes("zero2", **sizes) == 12 * 1000 * 3 / 4
    split = volumes(Load(1, 4, 1, 1.0, 100, 1000), 2, 1)["tensor parallel"]
    assert mesh_bytes("none", **{**sizes, "tensor": 4, "data": 1}) == pytest.approx(split)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 30), st.integers(0, 3))
def test_nothing_is_proposed_that_does_not_fit(most_layers: int, slots: int) -> None:
    """A home machine holds so many layers, a lab's anything, with that many slots."""

    def look(priced: Priced) -> Fits:
        each = -(-RUN.model.num_layers // priced.cut.stages) * priced.stages_per_peer
        return of_places(priced, MachineFit(slots * (each <= most_layers), 1 << 34), MachineFit(slots, 1 << 34))

    members = fleet(HOME, LAB.model_copy(update={"count": 2}))
    if not slots:
        with pytest.raises(UsageError, match="no stages fit these machines"):
            search(SPEC, {}, members, look)
        return
    best, few = search(SPEC, {}, members, look)
    assert best in few
    for each in few:
        for fits, counts in zip(each.fits, each.situation.counts, strict=True):
            assert all(not n or fit.slots >= each.way.slots for fit, n in zip(fits, counts, strict=True))
            assert any(counts)


def test_the_search_keeps_what_is_said_and_prefers_what_is_fast() -> None:
    members = fleet(HOME, LAB)
    best, few = search(SPEC, {"cut.stages": 2, "averaging.codec": "int64"}, members, roomy)
    assert {each.cut.stages for each in few} == {2} and {each.way.codec for each in few} == {"int64"}
    best, few = search(SPEC, {}, members, roomy)
    assert best.seconds <= 1.1 * min(each.seconds for each in few)
    # On a line this slow fewer sums are sent.
    slow = fleet(HOME.model_copy(update={"mbit": 1.0}))
    assert search(changed(SPEC, total_steps=5000), {}, slow, roomy)[0].way.sync == "local"
    with pytest.raises(UsageError, match="fewer than the stages"):
        search(spec_of(8), {"cut.stages": 8}, fleet(LAB), roomy)


def test_microbatches_are_halved_down_to_what_keeps_a_device_busy() -> None:
    seen: set[int] = set()

    def look(priced: Priced) -> Fits:
        seen.add(priced.training.microbatch_size)
        return of_places(priced, MachineFit(64 * (priced.training.microbatch_size == 8), 1))

    spec = changed(SPEC, microbatch_size=64, sequence_length=128)
    best, _ = search(spec, {"cut.stages": 1}, fleet(HOME), look)
    assert seen == {64, 32, 16, 8} and best.training.microbatches == 32 * 64 // 8, "1,024 tokens at least"


def test_a_fleet_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text("[[machines]]\ncount = 3\ngpu_gib = 24.0\nmbit = 50.0\ngpus = 2\n", encoding="utf-8")
    (kind,) = read_fleet(file, FleetFile).members(str(file)).machines
    assert (kind.count, kind.device_bytes, kind.flops_per_s, kind.bytes_per_s) == (3, 24 << 30, 60e12, 6.25e6)


# ---------------------------------------------------------------- memory


SIZES = st.integers(0, 10**6)


def rank(held: int, microbatch: int, update: int = 0) -> RankMemory:
    return RankMemory(10, 20, 30, 40, update=update, held=held, microbatch=microbatch, offloaded=0)


@given(SIZES, SIZES, st.integers(1, 50))
def test_each_further_microbatch_takes_what_one_holds(held: int, over: int, count: int) -> None:
    found = rank(held, held + over)
    assert found.peak(count + 1) - found.peak(count) == held
    assert found.peak(0) == found.state == 100


def test_a_job_is_a_microbatch_or_an_update_whichever_takes_more() -> None:
    assert [rank(5, 7, update=update).peak(2) for update in (0, 30)] == [100 + 2 * 5 + 2, 100 + 2 * 5 + 30]


def staged(stage: int, held: int, microbatch: int, ranks: int, *, on_host: bool) -> StageMemory:
    return StageMemory(stage, range(1), ranks, rank(held, microbatch), {"memo": 1000}, 2, on_host)


@pytest.mark.parametrize("on_host", [False, True])
def test_stages_of_one_process_compute_one_at_a_time_and_those_of_ranks_have_processes(on_host: bool) -> None:
    lasting, memo = 2 * 100 + 2 * 5 + 2 * 9, 2000 * on_host
    for ranks, need in ((1, lasting + max(50 - 5, 20 - 9)), (2, (1 + on_host) * (lasting + (50 - 5) + (20 - 9)))):
        plans = [staged(0, 5, 50, ranks, on_host=on_host), staged(1, 9, 20, ranks, on_host=on_host)]
        assert together(plans) == need + memo


@given(st.lists(st.tuples(SIZES, SIZES, SIZES), min_size=1, max_size=4), st.integers(1, 3), st.booleans())
def test_together_stages_need_more_than_alone_and_no_more_than_all_alone(
    sizes: list[tuple[int, int, int]], ranks: int, on_host: bool
) -> None:
    plans = [
        staged(stage, max(stash, owed), max(stash, owed) + over, ranks, on_host=on_host)
        for stage, (stash, owed, over) in enumerate(sizes)
    ]
    alone = [together([plan]) for plan in plans]
    assert max(alone) <= together(plans) <= sum(alone)
    assert together(plans[:1]) == alone[0]


def test_sizes_are_read_and_shown_in_three_digits() -> None:
    read = {"24GiB": 24 * GIB, "24 gib": 24 * GIB, "80g": 80 * GIB, "1.5GiB": 3 * GIB // 2, "24GB": 24 * 10**9}
    read |= {"512MiB": 2**29, "1024 B": 1024, "7B": 7}
    assert {text: read_size(text) for text in read} == read
    for text in ("", "GiB", "much", "-3GiB", "0GiB", "24", "1073741824", "0.5", "24GiBs", "1e99GiB", "nan"):
        with pytest.raises(ValueError):
            read_size(text)
    told = {0: "0 B", 1023: "1023 B", 1024: "1.00 KiB", 24 * GIB: "24.0 GiB", GIB - 1: "1.00 GiB", 100 * GIB: "100 GiB"}
    told |= {int(9.994 * GIB): "9.99 GiB", int(9.996 * GIB): "10.0 GiB"}
    assert {size: shown(size) for size in told} == told
