"""Who may be dialled when: a third party is spared, and whoever has shown an address does not wait for others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.directory import MAX_ADDRESSES
from swarmnet.ids import PeerId
from swarmnet.net.address import Address
from swarmnet.net.dials import Dials
from swarmnet.net.limits import DIAL_FIRST_S, DIAL_NAMED_S, DIAL_OF_ALL_S, DIAL_SHOWN_S, HOST_DIALS

A, B = PeerId("a"), PeerId("b")
HERE, THERE = Address.of("192.0.2.1", 4000), Address.of("192.0.2.1", 4001)

AT_HOST = round(HOST_DIALS.burst_s * HOST_DIALS.per_s)


def fail(dials: Dials, peer: PeerId, address: Address, now: float, *, refused: bool = True) -> None:
    dials.begin(peer, address, now)
    dials.failed(peer, address, refused=refused, now=now)


def test_one_dials_at_a_time_and_another_port_is_another_address() -> None:
    dials = Dials()
    dials.begin(A, HERE, 0.0)
    assert dials.pause_s(B, HERE, 0.0) > 0.0 and dials.pause_s(B, THERE, 0.0) == 0.0
    dials.left(HERE)
    assert dials.pause_s(B, HERE, 0.0) == 0.0


def test_a_failure_makes_everybody_who_names_the_address_wait() -> None:
    dials = Dials()
    fail(dials, A, HERE, 0.0)
    assert dials.pause_s(A, HERE, 0.0) == dials.pause_s(B, HERE, 0.0) == DIAL_FIRST_S
    assert dials.pause_s(B, HERE, DIAL_FIRST_S) == 0.0


def test_a_peer_that_never_answers_is_dialled_less_and_less() -> None:
    dials, now, waited = Dials(), 0.0, []
    for _ in range(20):
        fail(dials, A, HERE, now)
        waited.append(round(dials.pause_s(A, HERE, now), 6))
        now += waited[-1] + 1e-6
    assert waited == sorted(waited) and waited[-1] == DIAL_NAMED_S


def test_sixty_records_that_name_a_third_party_dial_it_once_a_second() -> None:
    """Each peer's line asks a hundred times a second, as 60 links and their heartbeats would."""
    dials, count = Dials(), 0
    names = [PeerId(f"bogus {number}") for number in range(60)]
    for tick in range(6000):
        for peer in names:
            if not dials.pause_s(peer, HERE, tick / 100):
                fail(dials, peer, HERE, tick / 100, refused=False)
                count += 1
    assert count <= 60 / DIAL_OF_ALL_S + 6


def test_who_answered_waits_for_nobody_and_not_for_long() -> None:
    dials, now = Dials(), 0.0
    dials.begin(A, HERE, 0.0)
    dials.answered(A, HERE)
    for _ in range(20):
        fail(dials, B, HERE, now)
    assert dials.pause_s(A, HERE, now) == 0.0
    dials.begin(B, HERE, 0.0)
    assert dials.pause_s(A, HERE, now) == 0.0
    for _ in range(20):
        fail(dials, A, HERE, now)
    assert dials.pause_s(A, HERE, now) == DIAL_SHOWN_S
    dials.answered(A, HERE)
    assert dials.pause_s(A, HERE, now) == 0.0


def test_who_calls_from_there_is_dialled_at_once() -> None:
    dials = Dials()
    fail(dials, A, HERE, 0.0)
    fail(dials, B, HERE, 0.0)
    dials.called(A, "192.0.2.1")
    assert dials.pause_s(A, HERE, 0.0) == 0.0 and dials.pause_s(B, HERE, 0.0) > 0.0
    elsewhere = Address.of("198.51.100.7", 4000)
    fail(dials, A, elsewhere, 0.0)
    dials.called(A, "192.0.2.1")
    assert dials.pause_s(A, elsewhere, 0.0) > 0.0, "an address at another host is no more its own than before"


def test_what_was_found_is_remembered() -> None:
    dials = Dials()
    assert not dials.refused(HERE)
    fail(dials, A, HERE, 0.0)
    assert dials.refused(HERE)
    fail(dials, A, HERE, 9.0, refused=False)
    assert not dials.refused(HERE)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), max_size=100))
def test_a_peer_has_room_for_as_many_addresses_as_a_record(dialled: list[tuple[int, int]]) -> None:
    dials = Dials()
    for peer, port in dialled:
        fail(dials, PeerId(str(peer)), Address.of("192.0.2.1", 1 + port), 0.0)
    assert all(len(own) <= MAX_ADDRESSES for own in dials._own.values()) and not dials._under_way


def test_made_up_peers_of_a_relay_leave_it_to_those_who_are_there() -> None:
    dials, relay = Dials(), PeerId("relay")
    made_up = {PeerId(f"m{number}"): Address.circuit(relay, PeerId(f"m{number}")) for number in range(100)}
    asked = 0
    for second in range(20):
        for number in range(5):
            now = second + number / 5
            for peer, address in made_up.items():
                if not dials.pause_s(peer, address, now):
                    fail(dials, peer, address, now, refused=False)
                    asked += 1
    # A first dial each, and the few that make the pause as long as it gets.
    assert asked <= len(made_up) + 20 / DIAL_OF_ALL_S + 10
    there = Address.circuit(relay, A)
    assert dials.pause_s(A, there, 60.0) == 0.0, "a newcomer"
    dials.begin(A, there, 0.0)
    dials.answered(A, there)
    fail(dials, A, there, 60.0, refused=False)
    assert 0.0 < dials.pause_s(A, there, 60.0) <= DIAL_FIRST_S, "its own failures alone"


@pytest.mark.parametrize(
    "place",
    [lambda n: Address.of("192.0.2.1", 1 + n), lambda n: Address.of(f"n{n}.example.org", 4000)],
    ids=["ports of one host", "names of one wildcard record"],
)
def test_a_host_is_not_dialled_often_however_many_addresses_lead_there(place: Callable[[int], Address]) -> None:
    dials, count, named = Dials(), 0, [(PeerId(f"m{n}"), place(n)) for n in range(500)]
    for tick in range(100):
        for peer, address in named:
            if not dials.pause_s(peer, address, tick / 10):
                dials.begin(peer, address, tick / 10)
                count += 1
    assert AT_HOST <= count <= AT_HOST + 10 * HOST_DIALS.per_s + 1
    assert dials.pause_s(A, Address.of("198.51.100.7", 1), 10.0) == 0.0, "another host"
    dials.called(A, place(0).host)
    assert dials.pause_s(A, place(0), 10.0) == 0.0, "who has shown that it is there"


def test_many_peers_that_are_there_are_dialled_at_once() -> None:
    dials = Dials()
    for number in range(4 * AT_HOST):
        peer, address = PeerId(f"p{number}"), Address.of("192.0.2.1", 1 + number)
        assert dials.pause_s(peer, address, 0.0) == 0.0
        dials.begin(peer, address, 0.0)
        dials.answered(peer, address)
