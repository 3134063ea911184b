"""Who has drifted, and who takes whose state: everybody judges alone, and all come to the same."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from stage_table import calls_of

from swarmnet.ids import Chain, PeerId
from swarmnet.manifest.timers import Timers
from swarmnet.messages import Heartbeat, Measure, Stamp
from swarmnet.step.drift import MOST_RESTS, Drift, DriftRules, may_go, resyncs
from swarmnet.step.graph import leader_rank
from swarmnet.step.host import Deferred
from swarmnet.step.view import View

CHAIN, TERM = Chain("1" * 64), Chain("2" * 64)
RULES = DriftRules(every=10, resync_every=100)


def measure(bits: int, *, version: int = 10, chain: Chain = CHAIN) -> Measure:
    return Measure(version, chain, hashlib.sha256(bytes([bits])).digest())


def in_order(count: int) -> list[PeerId]:
    """Names in the order of leaders."""
    return sorted((PeerId(f"peer{n}") for n in range(count)), key=lambda peer: leader_rank(TERM, 0, peer))


class Stage:
    """Replicas that hear each other's heartbeats at once. bits, numerics: of each, in the order of leaders."""

    def __init__(self, bits: list[int], numerics: list[str] | None = None, rules: DriftRules = RULES) -> None:
        self.order = in_order(len(bits))
        self.bits = dict(zip(self.order, bits, strict=True))
        self.numerics = dict(zip(self.order, numerics or [""] * len(bits), strict=True))
        self.views = {peer: View(peer, 0, Timers()) for peer in self.order}
        self.host = Deferred()
        self.drifts = {peer: Drift(self.views[peer], rules, self.numerics[peer], self.host) for peer in self.order}
        self.now, self.version = 0.0, 0
        self.synced = dict.fromkeys(self.order, True)
        self.hear()

    def hear(self) -> None:
        self.now += 0.5
        for me, view in self.views.items():
            for peer in self.order:
                if peer != me:
                    view.hear(
                        peer,
                        Heartbeat(
                            Stamp(self.version, 0, CHAIN),
                            1,
                            self.synced[peer],
                            None,
                            numerics=self.numerics[peer],
                            measure=self.drifts[peer].mine,
                        ),
                        now=self.now,
                    )

    def measure(self) -> list[dict[str, object]]:
        """The next version that is measured. Returns what is said of it."""
        self.version += 10
        for peer, drift in self.drifts.items():
            if self.synced[peer]:
                drift.measured(measure(self.bits[peer], version=self.version), TERM, now=self.now)
        self.hear()
        return [fields for peer in self.order for fields in self.review(peer)]

    def review(self, peer: PeerId) -> list[dict[str, object]]:
        self.drifts[peer].review(now=self.now)
        calls = calls_of(self.host)
        assert all((call.name, call.args) == ("log", ("drift",)) for call in calls)
        return [call.fields for call in calls]

    def repair(self) -> dict[PeerId, tuple[PeerId, ...]]:
        """Everybody whose turn it is goes at once, and is back before anybody looks again."""
        going = {peer: donors for peer, drift in self.drifts.items() if (donors := drift.donors(now=self.now))}
        took = {peer: self.bits[donors[0]] for peer, donors in going.items()}
        for peer, bits in took.items():
            self.drifts[peer].repairing()
            self.drifts[peer].forget()
            self.bits[peer] = bits
        self.hear()
        return going


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from("ab")), min_size=1, max_size=9))
def test_the_leaders_class_ends_with_what_stood_and_few_are_away_at_a_time(parts: list[tuple[int, str]]) -> None:
    begun, kept = [bits for bits, _ in parts], parts[0][1]
    stage = Stage(begun, [numerics for _, numerics in parts])
    stood = Counter(bits for bits, numerics in parts if numerics == kept).most_common(1)[0][0]
    stage.measure()
    for _ in range(len(parts)):
        going = stage.repair()
        assert len(going) <= max(1, (len(parts) - 1) // 2), "never more than a minority, but one of two"
        for peer, donors in going.items():
            assert donors and not going.keys() & set(donors), "whoever hands over state stays"
            assert all(stage.bits[donor] == stood and stage.numerics[donor] == kept for donor in donors), peer
    for peer, bits in zip(stage.order, begun, strict=True):
        assert stage.bits[peer] == (stood if stage.numerics[peer] == kept else bits)
    stage.measure()
    assert not stage.repair(), "what agrees is left alone"


def test_the_odd_one_of_three_is_named_and_repairs() -> None:
    stage = Stage([7, 7, 9])
    odd = stage.order[2]
    said = stage.measure()
    assert {note["peer"] for note in said} == {odd} and len(said) == 2, "by itself, and by the first in order"
    assert all(note["donor"] == stage.order[0] and note["measured"] == 3 for note in said)
    assert stage.measure() != [] and stage.repair().keys() == {odd}


def test_strangers_outvote_no_voter() -> None:
    stage = Stage([1, 1, 1, 2, 2, 2, 2])
    for view in stage.views.values():
        view.voters = frozenset(stage.order[:3])
    said = stage.measure()
    assert not {fields["peer"] for fields in said} & set(stage.order[:3])
    assert not set(stage.repair()) & set(stage.order[:3])


def test_where_as_many_have_these_as_those_the_first_in_order_stands() -> None:
    for bits in ([1, 2], [1, 2, 3], [1, 1, 2, 2]):
        stage = Stage(bits)
        stage.measure()
        while stage.repair():
            pass
        assert set(stage.bits.values()) == {1}


def test_the_first_in_order_gives_way_to_a_majority() -> None:
    stage = Stage([9, 7, 7])
    assert {note["donor"] for note in stage.measure()} == {stage.order[1]}
    assert stage.repair().keys() == {stage.order[0]}


def test_nobody_judges_before_all_have_measured_or_had_the_time() -> None:
    """A, alone with B, would stand; C says that it must not."""
    stage = Stage([9, 7, 7])
    a, b, c = stage.order
    for peer in (a, b):
        stage.drifts[peer].measured(measure(stage.bits[peer]), TERM, now=stage.now)
    stage.hear()
    assert not stage.review(a) and stage.drifts[b].verdict is None
    stage.drifts[c].measured(measure(7), TERM, now=stage.now)
    stage.hear()
    assert [fields["peer"] for fields in stage.review(b)] == [a]


def test_who_measures_nothing_is_not_waited_for_for_ever_and_may_be_right() -> None:
    for bits, off in [([9, 7, 7], []), ([7, 7, 9, 7], []), ([7, 7, 7, 9, 9], [3]), ([9, 7, 7, 7, 7], [0])]:
        stage = Stage(bits)
        for peer in stage.order[:-1]:
            stage.drifts[peer].measured(measure(stage.bits[peer]), TERM, now=stage.now)
        for _ in range(8):
            stage.hear()
        for peer in stage.order[:-1]:
            stage.drifts[peer].review(now=stage.now)
            verdict = stage.drifts[peer].verdict
            assert verdict is not None and verdict.strays == {stage.order[place] for place in off}


def test_nobody_goes_while_others_are_away_or_nobody_could_help() -> None:
    stage = Stage([1, 2, 3])
    stage.measure()
    _first, second, third = stage.order
    stage.synced[third] = False
    stage.hear()
    assert not stage.drifts[second].donors(now=stage.now), "one of three is without state already"
    alone = Stage([1, 2])
    alone.measure()
    alone.synced[alone.order[0]] = False
    alone.hear()
    assert not alone.repair(), "the last one with state keeps it"


def test_other_chains_and_versions_say_nothing() -> None:
    stage = Stage([1, 2])
    a, b = stage.order
    stage.drifts[b].measured(measure(2, chain=TERM), TERM, now=stage.now)
    stage.drifts[a].measured(measure(1), TERM, now=stage.now)
    stage.hear()
    assert not stage.review(a) and stage.drifts[a].verdict is not None
    assert stage.drifts[a].verdict.judged == {a}


def test_a_repair_that_does_not_help_is_tried_less_and_less() -> None:
    """Two machines that claim one numerics class and have not the same arithmetic."""
    stage = Stage([1, 1, 2])
    odd, went = stage.order[2], []
    for number in range(400):
        stage.bits[odd] = 2
        stage.measure()
        if stage.repair():
            went.append(number)
    gaps = [later - earlier for earlier, later in itertools.pairwise(went)]
    assert gaps[:5] == [1, 2, 4, 8, 16] and max(gaps) <= MOST_RESTS + 1
    stage.measure()
    assert not stage.repair()
    for _ in range(MOST_RESTS + 1):
        stage.bits[odd] = 1
        stage.measure()
    stage.bits[odd] = 2
    stage.measure()
    assert stage.repair().keys() == {odd}, "once it has helped, the next one is repaired at once"


def test_classes_that_differ_by_rounding_are_measured_and_not_repaired() -> None:
    stage = Stage([1, 1, 2, 2], ["cpu", "cpu", "cuda", "cuda"])
    assert not stage.measure() and not stage.repair()
    assert {drift.compared_at for drift in stage.drifts.values()} == {10}


@given(st.lists(st.sampled_from(["cpu", "cuda", "rocm", ""]), min_size=1, max_size=9), st.integers(5, 60))
def test_other_classes_take_the_leaders_state_once_a_period_and_in_turns(classes: list[str], every: int) -> None:
    order = in_order(len(classes))
    numerics = dict(zip(order, classes, strict=True))
    went: Counter[PeerId] = Counter()
    for version in range(every, 2 * every):
        going = [peer for peer in order if resyncs(peer, numerics, version, every)]
        assert len(going) <= max(1, (len(order) - 1) // 2) or len(order) > every
        went.update(going)
    others = {peer for peer in order if classes[0] and numerics[peer] not in ("", classes[0])}
    assert went == Counter(others)
    assert not any(resyncs(peer, numerics, version, 0) for peer in order for version in range(20))


def test_whose_state_another_class_takes() -> None:
    stage = Stage([1, 1, 2], ["cpu", "cpu", "cuda"])
    a, b, c = stage.order
    assert stage.drifts[c].class_donors(100, TERM, now=stage.now) == (a, b)
    assert stage.drifts[c].class_donors(101, TERM, now=stage.now) == ()
    assert stage.drifts[b].class_donors(100, TERM, now=stage.now) == ()


@given(st.integers(1, 12), st.sets(st.integers(0, 11)), st.integers(0, 12))
def test_most_stay(size: int, off: set[int], away: int) -> None:
    order = in_order(size)
    strays = frozenset(peer for number, peer in enumerate(order) if number in off)
    going = may_go(strays, order, away=away)
    assert set(going) <= strays and len(going) < size
    total = size + away
    assert not going or len(going) + away <= max(1, (total - 1) // 2)


def test_versions_that_are_measured() -> None:
    rules = DriftRules(every=10)
    assert [v for v in range(26) if rules.due(v, last=25)] == [10, 20, 25]
    assert not any(DriftRules(every=0).due(v, last=25) for v in range(26))
