"""What kind of NAT it is, whom a peer dials through it, and how often others may have it dial."""

from __future__ import annotations

import asyncio
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.errors import PeerGone
from swarmnet.ids import PeerId
from swarmnet.net.limits import HOST_PUNCHES, PUNCH_AGAIN
from swarmnet.net.nat.kinds import AT_ONCE, BUSY_S, LASTED_S, MOST_DIALLED, NatKind, Punches, Sight, dialled
from swarmnet.net.nat.punch import PunchPort, punch

HOME = ("192.168.1.2", 4711)
OUT = ("44.0.0.9", 4711)
PEER, OTHER = PeerId("peer"), PeerId("other")

FIRST_PAUSE_S, LONGEST_PAUSE_S = PUNCH_AGAIN().first_s, PUNCH_AGAIN().longest_s


@pytest.mark.parametrize(
    ("sight", "kind"),
    [
        (Sight(OUT, (OUT, OUT)), "none"),
        (Sight(HOME, (OUT, OUT)), "cone"),
        (Sight(HOME, (("44.0.0.9", 99), ("44.0.0.9", 99))), "cone"),
        (Sight(HOME, (OUT, ("44.0.0.9", 4712))), "symmetric"),
        (Sight(("100.64.0.3", 4711), (OUT, OUT)), "carrier"),
        (Sight(HOME, (OUT,)), "unknown"),
        (Sight(("127.0.0.1", 4711), (("127.0.0.1", 4711),) * 2), "none"),
        (Sight(HOME, (HOME, ("127.0.0.1", 4711))), "none"),
        (Sight(HOME, (OUT, ("127.0.0.1", 4711))), "unknown"),
        (Sight(HOME, (("127.0.0.1", 4711),) * 2), "unknown"),
        (Sight(HOME, (HOME, OUT)), "unknown"),
        (Sight(HOME, (HOME, OUT, ("44.0.0.9", 4712))), "symmetric"),
        (Sight(HOME, ()), "unknown"),
    ],
)
def test_what_members_saw_tells_the_kind(sight: Sight, kind: NatKind) -> None:
    assert sight.kind() == kind


def test_who_is_outside_is_dialled_outside_and_who_is_at_home_inside_first() -> None:
    mine = Sight(HOME, (OUT, OUT))
    assert dialled(mine, Sight(("192.168.1.7", 80), (("44.0.0.8", 81),) * 2)) == [("44.0.0.8", 81)]
    beside = Sight(("192.168.1.7", 80), (("44.0.0.9", 81),) * 2)
    assert dialled(mine, beside) == [("192.168.1.7", 80), ("44.0.0.9", 81)]
    assert dialled(mine, Sight(HOME, (("44.0.0.9", 81),))) == [("44.0.0.9", 81)], "another home of one carrier's"
    symmetric = Sight(("192.168.1.7", 80), (("44.0.0.8", 81), ("44.0.0.8", 82)))
    # Our router lets in whom we have called, if it is of the kind that looks at hosts alone.
    assert dialled(mine, symmetric) == [("44.0.0.8", 81), ("44.0.0.8", 82)]
    assert dialled(symmetric, symmetric) == []


places = st.tuples(
    st.sampled_from(["44.0.0.9", "8.8.8.8", "127.0.0.1", "10.0.0.1", "192.168.1.9", "x", ""]), st.just(1)
)


@given(places, st.lists(places, max_size=2).map(tuple))
def test_nobody_is_dialled_in_another_house(inside: tuple[str, int], outside: tuple[tuple[str, int], ...]) -> None:
    found = dialled(Sight(HOME, (OUT,)), Sight(inside, outside))
    assert len(found) <= MOST_DIALLED and not {"127.0.0.1", "x", ""} & {host for host, _ in found}
    private = {host for host, _ in found if host.startswith(("10.", "192."))}
    assert private <= {inside[0]} and (not private or "44.0.0.9" in {host for host, _ in outside})


def test_failures_make_the_next_punch_wait_longer_and_a_good_connection_makes_it_wait_no_more() -> None:
    punches, now, waits = Punches(), 0.0, []
    for _ in range(9):
        assert punches.wait_s(PEER, now) == 0.0
        punches.failed(PEER, now)
        waits.append(punches.wait_s(PEER, now))
        now += waits[-1]
    assert waits[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S] and waits[-1] == LONGEST_PAUSE_S
    for lasted_s, wait_s in ((1.0, LONGEST_PAUSE_S), (LASTED_S, 0.0)):
        punches.ended(PEER, now, lasted_s=lasted_s)
        assert punches.wait_s(PEER, now) == wait_s
        now += wait_s


def test_many_peers_cannot_have_one_host_dialled_often() -> None:
    punches, victim, other = Punches(), ("44.0.0.8", 1), ("44.0.0.6", 1)
    for _ in range(round(HOST_PUNCHES.burst_s * HOST_PUNCHES.per_s)):
        assert punches.take([victim, other, ("44.0.0.8", 2)], 0.0, asks=True) == [victim, other, ("44.0.0.8", 2)]
        other = (f"{other[0]}6", 1)
    again_s = 1 / HOST_PUNCHES.per_s
    assert punches.take([victim, other], again_s / 2, asks=True) == [other]
    assert punches.take([victim], again_s / 2) == [victim], "what others ask for does not keep me from asking"
    assert punches.take([victim], again_s, asks=True) == [victim] and punches.take([victim], again_s, asks=True) == []


def test_a_peer_asks_while_it_is_asked_and_takes_part_in_few_punches_at_once() -> None:
    punches = Punches()
    punches.under_way.add((PEER, False))
    assert punches.wait_s(PEER, 0.0, asks=True) == 0.0, "each of two peers asks for its own connection"
    assert punches.wait_s(PEER, 0.0) == BUSY_S, "one of them at a time"
    punches.under_way.update((PeerId(str(number)), True) for number in range(AT_ONCE))
    assert (punches.wait_s(OTHER, 0.0), punches.wait_s(OTHER, 0.0, asks=True)) == (0.0, BUSY_S)
    punches.under_way.update((PeerId(str(number)), False) for number in range(AT_ONCE))
    assert punches.wait_s(OTHER, 0.0) == BUSY_S


def test_who_asks_in_vain_waits_and_is_asked_all_the_same() -> None:
    punches = Punches()
    punches.failed(PEER, 0.0)
    assert (punches.wait_s(PEER, 0.0), punches.wait_s(PEER, 0.0, asks=True)) == (FIRST_PAUSE_S, 0.0)


# ---------------------------------------------------------------- both ends, on this machine

ONE, TWO = b"1" * 16, b"2" * 16


def at(hole: PunchPort) -> tuple[str, int]:
    return "127.0.0.1", hole.port


async def test_two_that_dial_each_other_have_one_connection() -> None:
    with PunchPort() as one, PunchPort() as other:
        first, second = await asyncio.gather(
            punch(one, [at(other)], mine=ONE, theirs=TWO, decides=True),
            punch(other, [at(one)], mine=TWO, theirs=ONE, decides=False),
        )
    with first, second:
        assert first.getpeername() == second.getsockname() and second.getpeername() == first.getsockname()


async def test_one_that_is_not_expected_is_not_taken_for_the_peer() -> None:
    with PunchPort() as one, PunchPort() as other:
        results = await asyncio.gather(
            punch(one, [at(other)], mine=ONE, theirs=TWO, decides=True, limit_s=0.3),
            punch(other, [at(one)], mine=b"3" * 16, theirs=ONE, decides=False, limit_s=0.3),
            return_exceptions=True,
        )
    assert all(isinstance(result, PeerGone) for result in results), results


async def test_who_refuses_is_dialled_a_few_times_and_who_listens_late_is_reached() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = free.getsockname()
    with PunchPort() as one, PunchPort() as other:
        late = asyncio.create_task(punch(one, [nobody, at(other)], mine=ONE, theirs=TWO, decides=True))
        await asyncio.sleep(0)
        second = await punch(other, [], mine=TWO, theirs=ONE, decides=False)
        with second, await late:
            pass
