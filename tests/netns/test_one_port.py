"""Tensors behind a firewall that lets one port through: gRPC carries them, and no call waits for the other port."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from benchmark_modules import load
from bulk_end import CALLS, PORT

links = load("links")

pytestmark = pytest.mark.netns

ENV = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
END = (sys.executable, str(Path(__file__).with_name("bulk_end.py")))


def calls(*, one_port: bool) -> list[dict]:
    """What the sender says of its calls."""
    with ExitStack() as stack:
        try:
            lines = links.Links(2, mbit=1000.0, rtt_ms=10.0)
            places = stack.enter_context(lines)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no emulated links here: {error}")
        if one_port:
            lines.only_port(0, PORT)
        (there, at), (here, mine) = places
        pipe = subprocess.PIPE
        with subprocess.Popen([*END, there, at], stdin=pipe, stdout=pipe, text=True, env=ENV) as taker:
            try:
                peer, address = taker.stdout.readline().split()
                words = [*END, here, mine, peer, address]
                said = subprocess.run(words, capture_output=True, text=True, timeout=90, env=ENV, check=False)
            finally:
                taker.terminate()
    assert said.returncode == 0, said.stderr
    return [json.loads(line) for line in said.stdout.splitlines()]


def test_a_run_goes_on_where_only_the_grpc_port_is_open() -> None:
    made = calls(one_port=True)
    assert [call["same"] for call in made] == [[True]] * CALLS
    assert [call["connections"] for call in made] == [0] * CALLS
    assert max(call["seconds"] for call in made) < 3.0, "no call waits for a dial, which takes five seconds"


def test_where_both_ports_are_open_connections_are_opened() -> None:
    made = calls(one_port=False)
    assert [call["same"] for call in made] == [[True]] * CALLS
    assert made[-1]["connections"] > 0
