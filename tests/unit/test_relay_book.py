"""What a relay grants to whom: places, callers that wait, circuits, each within its cap."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.ids import PeerId
from swarmnet.net.address import home_of
from swarmnet.net.nat.relay_book import (
    COMING_FROM_ADDRESS,
    COMING_OF_CALLER,
    IDLE_BYTES,
    IDLE_S,
    MOST_COMING,
    RelayBook,
    RelayCaps,
    too_many,
)

CALLER, PEER, OTHER = PeerId("caller"), PeerId("peer"), PeerId("other")


def ident(number: int) -> bytes:
    return number.to_bytes(16, "big")


def book(**caps: int) -> RelayBook:
    found = RelayBook(RelayCaps(**caps))
    assert not found.reserve(PEER, "a") and not found.reserve(OTHER, "b")
    return found


def test_places_are_few_and_fewer_from_one_address() -> None:
    found = RelayBook(RelayCaps(peers=4))
    assert [found.reserve(PeerId(name), "a") for name in "xyz"] == [
        "",
        "",
        "2 reservations are taken from that address",
    ]
    assert not found.reserve(PeerId("x"), "b"), "it keeps its place when it comes from elsewhere"
    assert not found.reserve(PeerId("z"), "a") and not found.reserve(PeerId("w"), "c")
    assert found.reserve(PeerId("v"), "d") == "all 4 reservations are taken"
    found.leave(PeerId("x"))
    found.leave(PeerId("x"))
    assert not found.reserve(PeerId("v"), "d")
    assert RelayBook(RelayCaps(peers=0)).reserve(PEER, "a") == "this peer does not relay"


def test_only_the_one_that_is_waited_for_arrives_and_only_once() -> None:
    found = book()
    assert found.call(CALLER, PeerId("nobody"), ident(1), 0.0) == "no reservation here"
    assert not found.call(CALLER, PEER, ident(1), 0.0)
    assert found.call(OTHER, PEER, ident(1), 0.0) == "the id is taken"
    assert not found.arrive(PEER, ident(2), 1.0) and not found.arrive(OTHER, ident(1), 1.0)
    assert found.arrive(PEER, ident(1), 1.0) and not found.arrive(PEER, ident(1), 1.0)
    found.end(PEER, ident(1))
    assert not found.arrive(PEER, ident(1), 2.0) and not len(found)


def test_one_caller_cannot_take_what_all_share() -> None:
    found = book(of_caller=5, of_pair=3, waiting_of_caller=2, of_peer=4, circuits=8)
    assert [bool(found.call(CALLER, PEER, ident(at), 0.0)) for at in range(3)] == [False, False, True]
    assert found.arrive(PEER, ident(0), 0.0) and found.arrive(PEER, ident(1), 0.0)
    assert not found.call(CALLER, PEER, ident(3), 0.0) and found.arrive(PEER, ident(3), 0.0)
    assert found.call(CALLER, PEER, ident(4), 0.0) == "too many circuits to that peer"
    assert not found.call(CALLER, OTHER, ident(4), 0.0) and not found.call(CALLER, OTHER, ident(5), 0.0)
    assert found.call(CALLER, OTHER, ident(6), 0.0) == "too many circuits"
    assert not found.call(PeerId("more"), PEER, ident(7), 0.0), "another caller has its own"
    assert found.call(PeerId("most"), PEER, ident(8), 0.0) == "too many circuits to that peer"


def test_all_callers_together_take_no_more_circuits_than_there_are() -> None:
    found = book(circuits=4)
    said = [found.call(PeerId(f"caller {at}"), PEER, ident(at), 0.0) for at in range(5)]
    assert said == ["", "", "", "", "too many circuits"]


def test_one_home_cannot_take_what_all_share_under_many_names() -> None:
    found = book(circuits=8)
    said = [found.call(PeerId(f"caller {at}"), PEER, ident(at), 0.0, home="a") for at in range(3)]
    assert said == ["", "", "too many circuits from that address"]
    assert not found.call(CALLER, PEER, ident(3), 0.0, home="b")
    found.end(PEER, ident(0))
    assert not found.call(CALLER, PEER, ident(4), 0.0, home="a")


def test_a_hidden_peer_comes_for_few_streams_of_one_caller_and_of_one_address() -> None:
    mine = [("a", CALLER)] * COMING_OF_CALLER
    assert not too_many(mine[1:], ("a", CALLER)) and too_many(mine, ("a", CALLER))
    assert not too_many(mine, ("a", OTHER))
    assert not too_many(mine, ("b", CALLER)), "a relay may name callers that have not called"
    from_one = [("a", PeerId(f"{at}")) for at in range(COMING_FROM_ADDRESS)]
    assert not too_many(from_one[1:], ("a", CALLER)) and too_many(from_one, ("a", CALLER))
    assert not too_many(from_one, ("b", CALLER))
    everybody = [(f"{at}", CALLER) for at in range(MOST_COMING)]
    assert not too_many(everybody[1:], ("a", OTHER)) and too_many(everybody, ("a", OTHER))


def test_a_circuit_that_carries_only_signs_of_life_is_idle() -> None:
    found = book()
    assert not found.call(CALLER, PEER, ident(1), 0.0) and found.arrive(PEER, ident(1), 10.0)
    found.carried(PEER, ident(1), IDLE_BYTES)
    assert not found.idle(PEER, ident(1), 10.0 + IDLE_S - 1) and not found.idle(PEER, ident(1), 10.0 + IDLE_S)
    found.carried(PEER, ident(1), IDLE_BYTES - 1)
    assert found.idle(PEER, ident(1), 10.0 + 2 * IDLE_S)
    found.end(PEER, ident(1))
    assert not found.idle(PEER, ident(1), 10.0 + 4 * IDLE_S)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("203.0.113.7", "203.0.113.8", False),
        ("::ffff:203.0.113.7", "203.0.113.7", True),
        ("2001:db8:0:1::7", "2001:db8:0:1:ffff::8", True),
        ("2001:db8:0:1::7", "2001:db8:0:2::7", False),
        ("", "203.0.113.7", False),
    ],
)
def test_one_homes_addresses_count_as_one(one: str, other: str, same: bool) -> None:
    assert (home_of(one) == home_of(other)) is same


PEERS = st.sampled_from([PeerId(name) for name in "abcdef"])


@given(
    st.lists(st.tuples(st.sampled_from(["reserve", "leave", "call", "arrive", "end"]), PEERS, PEERS, st.integers(0, 9)))
)
def test_no_history_exceeds_a_cap(history) -> None:
    caps = RelayCaps(peers=3, circuits=6, of_caller=4, of_peer=5, of_pair=3, waiting_of_caller=2)
    found, calls = RelayBook(caps), {}
    for what, one, other, number in history:
        key = (other, ident(number))
        match what:
            case "reserve":
                found.reserve(one, one)
            case "leave":
                found.leave(one)
            case "call":
                if not found.call(one, *key, 0.0):
                    calls[key] = one, False
            case "arrive":
                if found.arrive(*key, 0.0):
                    assert not calls[key][1]
                    calls[key] = calls[key][0], True
            case "end":
                found.end(*key)
                calls.pop(key, None)
        assert len(found.places) <= caps.peers and len(found) == len(calls) <= caps.circuits
        assert max(Counter(caller for caller, _ in calls.values()).values(), default=0) <= caps.of_caller
        assert max(Counter(peer for peer, _ in calls).values(), default=0) <= caps.of_peer
        assert max(Counter(c for c, joined in calls.values() if not joined).values(), default=0) <= 2
