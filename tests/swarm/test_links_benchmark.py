"""The emulated lines of the averaging benchmark are no wider and no shorter than they are asked to be."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
from multiprocessing.connection import Connection

import pytest
from benchmark_modules import load

MBIT, RTT_MS, MEGABYTES = 80.0, 40.0, 4


links, raw_tcp = load("links"), load("raw_tcp")


def test_a_lane_carries_no_more_than_its_width_and_drops_what_would_wait_too_long() -> None:
    lane = links.Lane(8.0)  # a megabyte a second
    assert lane.passes(100_000, 5.0) == pytest.approx(5.1)
    assert lane.passes(100_000, 5.0) == pytest.approx(5.2)
    assert lane.passes(100_000, 5.0) == pytest.approx(5.3)
    assert lane.passes(100_000, 5.0) is None, "a queue of 0.2 s is full"
    assert lane.passes(100_000, 9.0) == pytest.approx(9.1)


def peer(rank: int, places: list[tuple[str, str]], pipe: Connection) -> None:
    """Listen, connect, send and receive, twice."""
    links.enter(places[rank][0])
    mine = raw_tcp.RawPeer(rank, [address for _, address in places])
    pipe.send(None)
    pipe.recv()
    mine.connect()
    for _ in range(2):
        pipe.send(None)
        pipe.recv()
        pipe.send(mine.turn(MEGABYTES * 1_000_000))
        pipe.recv()
    mine.close()


@pytest.mark.skipif(
    os.geteuid() != 0 or not os.access("/dev/net/tun", os.W_OK) or shutil.which("ip") is None,
    reason="needs root, TUN devices and iproute2",
)
def test_plain_tcp_takes_as_long_as_the_line_says() -> None:
    try:
        emulated = links.Links(2, mbit=MBIT, rtt_ms=RTT_MS)
        places = emulated.__enter__()
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no emulated links here: {error}")
    fork = multiprocessing.get_context("fork")
    pipes, processes = [], []
    try:
        for rank in range(2):
            ours, theirs = fork.Pipe()
            processes.append(fork.Process(target=peer, args=(rank, places, theirs), daemon=True))
            processes[-1].start()
            pipes.append(ours)

        def all_say() -> list[dict[str, float]]:
            assert all(pipe.poll(30.0) for pipe in pipes)
            return [pipe.recv() for pipe in pipes]

        def all_hear() -> None:
            for pipe in pipes:
                pipe.send(None)

        all_say()
        all_hear()
        for _ in range(2):
            all_say()
            all_hear()
            found = all_say()
            all_hear()
        took = max(each["ended"] for each in found) - min(each["began"] for each in found)
        assert took >= 0.9 * MEGABYTES * 8 / MBIT + RTT_MS / 2e3, "no faster than the line"
    finally:
        for process in processes:
            process.kill()
            process.join()
        emulated.__exit__(None, None, None)
