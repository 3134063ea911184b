"""A table that strangers fill: bounded, and the entry that was set longest ago goes first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarmnet.bounds import Recent


@given(st.integers(1, 5), st.lists(st.integers(0, 9)))
def test_the_latest_stay(most: int, keys: list[int]) -> None:
    table: Recent[int, int] = Recent(most)
    for at, key in enumerate(keys):
        table[key] = at
    latest = list(dict.fromkeys(reversed(keys)))[:most]
    assert list(table) == latest[::-1] and all(keys[at] == key for key, at in table.items())


def test_looking_does_not_renew() -> None:
    table: Recent[str, int] = Recent(2)
    table["a"], table["b"] = 1, 2
    assert table.get("a") == 1 and table["a"] == 1
    table["c"] = 3
    assert list(table) == ["b", "c"]
