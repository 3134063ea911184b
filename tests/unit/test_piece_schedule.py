"""Who is asked for which piece: each once from somebody who lives, the faster do more, the slow hold up nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarmnet.ids import PeerId
from swarmnet.stage.piece_schedule import Action, Ask, Drop, PieceSchedule

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


class World:
    """Performs what a schedule asks for, and checks every action against the rules."""

    def __init__(self, num_pieces: int, window: int = 4, done: frozenset[int] = frozenset()) -> None:
        self.schedule = PieceSchedule(num_pieces, window=window, done=done)
        self.num_pieces, self.window = num_pieces, window
        self.flying: dict[tuple[PeerId, int], float] = {}
        self.asked: list[tuple[PeerId, int]] = []
        self.now = 0.0

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            at = action.peer, action.piece
            if isinstance(action, Drop):
                assert self.flying.pop(at, None) is not None, "dropped what was not asked for"
                continue
            assert isinstance(action, Ask) and at not in self.flying, "asked twice at once"
            assert action.peer in self.schedule.sources and action.piece not in self.schedule.done
            self.flying[at] = self.now
            self.asked.append(at)
            assert sum(peer == action.peer for peer, _ in self.flying) <= self.window
            assert sum(piece == action.piece for _, piece in self.flying) <= 2

    def add(self, peer: PeerId) -> None:
        self.do(self.schedule.add(peer, now=self.now))

    def remove(self, peer: PeerId) -> None:
        self.do(self.schedule.remove(peer, now=self.now))
        assert not any(at == peer for at, _ in self.flying)

    def arrive(self, at: tuple[PeerId, int]) -> None:
        del self.flying[at]
        self.do(self.schedule.arrived(*at, now=self.now))

    def tick(self) -> None:
        self.do(self.schedule.fill(self.now))


@given(st.integers(0, 30), st.integers(1, 5), st.frozensets(st.integers(0, 29)), st.data())
def test_any_history_ends_with_every_piece_if_one_source_lives(
    num_pieces: int, window: int, done: frozenset[int], data: st.DataObject
) -> None:
    world = World(num_pieces, window, frozenset(piece for piece in done if piece < num_pieces))
    for _ in range(data.draw(st.integers(0, 25))):
        world.now += data.draw(st.floats(0, 5))
        match data.draw(st.sampled_from(["add", "remove", "arrive", "tick"])):
            case "add":
                world.add(data.draw(st.sampled_from([A, B, C])))
            case "remove":
                world.remove(data.draw(st.sampled_from([A, B, C])))
            case "arrive" if world.flying:
                world.arrive(data.draw(st.sampled_from(sorted(world.flying))))
            case "tick":
                world.tick()
        sources, left = world.schedule.sources, num_pieces - len(world.schedule.done)
        if sources and left:
            assert world.flying, "there is a source and something to fetch, and nobody was asked"
    world.remove(B)
    world.remove(C)
    world.add(A)
    for _ in range(num_pieces + 1):
        mine = sorted(world.flying)
        if mine:
            world.arrive(mine[0])
    assert world.schedule.complete and world.schedule.done == set(range(num_pieces)) and not world.flying


def run(world: World, pace: dict[PeerId, float], until: float = 1e9) -> dict[PeerId, int]:
    """Play a transfer: a source delivers one piece every `pace` seconds. Returns how many each delivered."""
    due = dict(pace)
    delivered = dict.fromkeys(pace, 0)
    while not world.schedule.complete:
        peer = min(due, key=lambda p: due[p])
        world.now = due[peer]
        assert world.now < until, "it takes too long"
        due[peer] += pace[peer]
        flying = sorted((asked, piece) for (at, piece), asked in world.flying.items() if at == peer)
        if flying:
            delivered[peer] += 1
            world.arrive((peer, flying[0][1]))
        world.tick()
    return delivered


def test_who_is_faster_delivers_more() -> None:
    world = World(120)
    for peer in (A, B):
        world.add(peer)
    delivered = run(world, {A: 1.0, B: 3.0})
    assert delivered[A] > 2.5 * delivered[B] and len(world.asked) < 130


def test_the_last_piece_does_not_wait_for_the_slowest() -> None:
    world = World(40)
    for peer in (A, B):
        world.add(peer)
    run(world, {A: 1.0, B: 500.0}, until=60.0)


def test_a_lone_source_is_asked_once_for_each_piece() -> None:
    world = World(25)
    world.add(A)
    run(world, {A: 1.0})
    assert sorted(piece for _, piece in world.asked) == list(range(25))


def test_only_what_a_lost_source_had_is_asked_for_again() -> None:
    world = World(20)
    for peer in (A, B):
        world.add(peer)
    lost = {piece for peer, piece in world.flying if peer == B}
    world.arrive(min(at for at in world.flying if at[0] == B))
    lost = {piece for peer, piece in world.flying if peer == B}
    world.remove(B)
    run(world, {A: 1.0})
    pieces = [piece for _, piece in world.asked]
    assert {piece for piece in pieces if pieces.count(piece) > 1} == lost


def test_pieces_that_are_there_are_not_asked_for() -> None:
    world = World(10, done=frozenset(range(7)))
    world.add(A)
    run(world, {A: 1.0})
    assert sorted(piece for _, piece in world.asked) == [7, 8, 9]


def test_a_late_piece_of_a_lost_source_counts() -> None:
    world = World(1)
    world.add(A)
    world.remove(A)
    world.add(B)
    world.do(world.schedule.arrived(A, 0, now=1.0))
    assert world.schedule.complete and not world.flying
