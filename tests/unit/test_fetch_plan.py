"""Which holder is asked for which piece: each once while it lives, the faster do more, the slow hold up nothing; and
which holders are left out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarmnet.fetch.plan import LEAVE_OUT_S, FetchPlan, Holders
from swarmnet.ids import PeerId

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


class World:
    """Performs what a plan asks for, as the driver does, and checks every request against the rules."""

    def __init__(self, num_pieces: int, window: int = 4, done: frozenset[int] = frozenset()) -> None:
        self.plan = FetchPlan(num_pieces, window=window, done=done)
        self.num_pieces, self.window = num_pieces, window
        self.flying: list[tuple[PeerId, int]] = []
        self.asked: list[tuple[PeerId, int]] = []
        self.now = 0.0

    def sync(self) -> None:
        wanted = self.plan.requests(now=self.now)
        assert len(set(wanted)) == len(wanted), "asked twice at once"
        for holder, piece in wanted:
            assert holder in self.plan.holders and piece not in self.plan.done
            assert sum(each == holder for each, _ in wanted) <= self.window
            assert sum(each == piece for _, each in wanted) <= 2
        self.asked += [at for at in wanted if at not in self.flying]
        self.flying = wanted

    def add(self, holder: PeerId) -> None:
        self.plan.add(holder)
        self.sync()

    def drop(self, holder: PeerId) -> None:
        self.plan.drop(holder)
        self.sync()

    def arrive(self, at: tuple[PeerId, int]) -> None:
        self.plan.arrived(*at, now=self.now)
        self.sync()


@given(st.integers(0, 30), st.integers(1, 5), st.frozensets(st.integers(0, 29)), st.data())
def test_any_history_ends_with_every_piece_if_one_holder_lives(
    num_pieces: int, window: int, done: frozenset[int], data: st.DataObject
) -> None:
    world = World(num_pieces, window, frozenset(piece for piece in done if piece < num_pieces))
    for _ in range(data.draw(st.integers(0, 25))):
        world.now += data.draw(st.floats(0, 5))
        match data.draw(st.sampled_from(["add", "drop", "arrive", "tick"])):
            case "add":
                world.add(data.draw(st.sampled_from([A, B, C])))
            case "drop":
                world.drop(data.draw(st.sampled_from([A, B, C])))
            case "arrive" if world.flying:
                world.arrive(data.draw(st.sampled_from(sorted(world.flying))))
            case "tick":
                world.sync()
        if world.plan.holders and not world.plan.complete:
            assert world.flying, "there is a holder and something to fetch, and nothing was asked"
    world.drop(B)
    world.drop(C)
    world.add(A)
    for _ in range(num_pieces + 1):
        if world.flying:
            world.arrive(min(world.flying))
    assert world.plan.complete and world.plan.done == set(range(num_pieces)) and not world.flying


def run(world: World, pace: dict[PeerId, float], until: float = 1e9) -> dict[PeerId, int]:
    """Play a transfer: a holder delivers one piece every `pace` seconds. Returns how many each delivered."""
    due = dict(pace)
    delivered = dict.fromkeys(pace, 0)
    while not world.plan.complete:
        holder = min(due, key=lambda each: due[each])
        world.now = due[holder]
        assert world.now < until, "it takes too long"
        due[holder] += pace[holder]
        flying = [at for at in world.flying if at[0] == holder]
        if flying:
            delivered[holder] += 1
            world.arrive(min(flying, key=world.asked.index))
        world.sync()
    return delivered


def test_a_faster_holder_delivers_more() -> None:
    world = World(120)
    for holder in (A, B):
        world.add(holder)
    delivered = run(world, {A: 1.0, B: 3.0})
    assert delivered[A] > 2.5 * delivered[B] and len(world.asked) < 130


def test_the_last_piece_does_not_wait_for_the_slowest() -> None:
    world = World(40)
    for holder in (A, B):
        world.add(holder)
    run(world, {A: 1.0, B: 500.0}, until=60.0)


def test_a_lone_holder_is_asked_once_for_each_piece() -> None:
    world = World(25)
    world.add(A)
    run(world, {A: 1.0})
    assert sorted(piece for _, piece in world.asked) == list(range(25))


def test_only_what_a_dropped_holder_had_is_asked_for_again() -> None:
    world = World(20)
    for holder in (A, B):
        world.add(holder)
    world.arrive(min(at for at in world.flying if at[0] == B))
    lost = {piece for holder, piece in world.flying if holder == B}
    world.drop(B)
    run(world, {A: 1.0})
    pieces = [piece for _, piece in world.asked]
    assert {piece for piece in pieces if pieces.count(piece) > 1} == lost


def test_pieces_that_are_there_are_not_asked_for() -> None:
    world = World(10, done=frozenset(range(7)))
    world.add(A)
    run(world, {A: 1.0})
    assert sorted(piece for _, piece in world.asked) == [7, 8, 9]


# ---------------------------------------------------------------- which holders are left out


def test_a_holder_that_was_late_is_left_out_for_a_minute() -> None:
    holders = Holders()
    holders.was_late(B, now=100.0)
    assert holders.to_ask([A, B, C, A], now=100.0) == [A, C]
    assert holders.to_ask([A, B, C], now=99.9 + LEAVE_OUT_S) == [A, C]
    assert holders.to_ask([A, B, C], now=100.0 + LEAVE_OUT_S) == [A, B, C]


def test_if_all_were_late_they_are_asked() -> None:
    holders = Holders()
    holders.was_late(A, now=0.0)
    holders.was_late(B, now=0.0)
    assert holders.to_ask([A, B], now=1.0) == [A, B]


def test_a_holder_that_answers_is_late_no_more() -> None:
    holders = Holders()
    holders.was_late(A, now=0.0)
    holders.answered(A)
    assert holders.to_ask([A, B], now=1.0) == [A, B]


def test_a_holder_that_sent_something_false_is_not_asked_even_if_it_is_the_only_one() -> None:
    holders = Holders()
    holders.sent_false(A, now=0.0)
    holders.was_late(B, now=0.0)
    assert holders.to_ask([A], now=1.0) == []
    assert holders.to_ask([A, B], now=1.0) == [B]
    assert holders.to_ask([A, B], now=LEAVE_OUT_S) == [A, B]


def test_a_piece_that_is_only_promised_is_asked_of_a_holder_that_has_delivered_nothing_yet() -> None:
    world = World(1)
    world.add(A)
    world.add(B)
    assert world.flying == [(A, 0)]
    world.now = 2.9
    world.sync()
    assert world.flying == [(A, 0)]
    world.now = 3.1
    world.sync()
    assert world.flying == [(A, 0), (B, 0)]
    world.arrive((B, 0))
    assert world.plan.complete and world.plan.overtaken == {A}
