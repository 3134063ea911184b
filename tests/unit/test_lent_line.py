"""What is lent of a line, on virtual time: tensors keep to it within a tenth, and control messages wait for nothing."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.net.traffic import BandwidthLimit
from swarmnet.testing.doubles import run_virtual

pytestmark = pytest.mark.virtual_time

PIECE = 2_000_000


async def pieces(line: BandwidthLimit, count: int, size: int = PIECE) -> None:
    for _ in range(count):
        await line.turn()
        line.spend(size)


@pytest.mark.parametrize("streams", [1, 8])
async def test_tensors_keep_to_what_is_lent(streams: int) -> None:
    line, now = BandwidthLimit(), asyncio.get_running_loop().time
    line.set_rate(1_000_000)
    await asyncio.gather(*(pieces(line, 48 // streams) for _ in range(streams)))
    assert 0.9 < line.total / 1_000_000 / (now() + PIECE / 1_000_000) < 1.1


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(1, 3_000_000), st.booleans()), min_size=1, max_size=30))
def test_no_stretch_carries_more_than_is_lent_and_a_piece(script: list[tuple[float, int, bool]]) -> None:
    async def main() -> None:
        line, now, rate = BandwidthLimit(), asyncio.get_running_loop().time, 1e6
        line.set_rate(rate)
        crossed: list[tuple[float, int]] = []
        for pause_s, size, control in script:
            await asyncio.sleep(pause_s)
            before = now()
            if not control:
                await line.turn()
            assert control is False or now() == before, "a control message waited"
            line.spend(size)
            crossed.append((now(), size))
        for start, (began, _) in enumerate(crossed):
            until = max(index for index, (_, size) in enumerate(crossed) if index >= start)
            passed = sum(size for _, size in crossed[start:until])
            held_back = [size for (_, size), (_, _, control) in zip(crossed, script, strict=True) if control]
            assert passed <= rate * (crossed[until][0] - began) + 3_000_000 + sum(held_back) + 1

    run_virtual(main())


async def test_tensors_wait_for_what_control_messages_took() -> None:
    line, now = BandwidthLimit(), asyncio.get_running_loop().time
    line.set_rate(1_000_000)
    line.spend(3_000_000)
    assert now() == 0.0
    await line.turn()
    assert now() == pytest.approx(3.0)


async def test_a_change_reaches_those_who_wait_already() -> None:
    line, now = BandwidthLimit(), asyncio.get_running_loop().time
    line.set_rate(1_000)
    waiting = asyncio.ensure_future(pieces(line, 2))
    await asyncio.sleep(1.0)
    line.set_rate(1_000_000)
    await waiting
    assert now() == pytest.approx(1.0 + (PIECE - 1_000) / 1_000_000)
    line.set_rate(0)
    await pieces(line, 100)
    assert now() == pytest.approx(1.0 + (PIECE - 1_000) / 1_000_000), "all of the line is lent again"


async def test_silence_gives_no_credit() -> None:
    line, now = BandwidthLimit(), asyncio.get_running_loop().time
    line.set_rate(1_000_000)
    await asyncio.sleep(3600.0)
    await pieces(line, 3)
    assert now() == pytest.approx(3604.0)
