"""The routers on the way are found without root, or nothing is; a carrier's is known by its address."""

from __future__ import annotations

import pytest

from swarmnet.net.hops import MOST_HOPS, behind_a_carrier, hops


@pytest.mark.parametrize(
    ("found", "carrier"),
    [
        (["192.168.1.1", "100.64.0.1", "", ""], True),
        (["192.168.1.1", "", "100.127.255.1", ""], True),
        (["100.64.0.1", "8.8.8.8", "", ""], False),  # the home's own network
        (["192.168.1.1", "203.0.113.1", "100.128.0.1", ""], False),
        ([""] * 4, False),
    ],
)
def test_a_carrier_is_known_by_its_routers(found: list[str], carrier: bool) -> None:
    assert behind_a_carrier(found) == carrier


def test_where_no_router_is_none_is_found() -> None:
    assert hops("127.0.0.1") == [""] * MOST_HOPS
    assert hops("no address") == [""] * MOST_HOPS
