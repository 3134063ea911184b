"""The limit is raised as far as it may be, and running out of descriptors is said once."""

from __future__ import annotations

import logging
import resource
import subprocess
import sys

import pytest

from swarmnet.net.descriptors import DescriptorWatch

SCRIPT = """
import os, resource
from swarmnet.net.descriptors import lowest_free, raise_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 128))
assert raise_limit() == 128 and resource.getrlimit(resource.RLIMIT_NOFILE) == (128, 128)
free = lowest_free()
assert free is not None and free == lowest_free()
held = [os.dup(0) for _ in range(128 - free)]
assert lowest_free() is None
"""


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 128, reason="fewer than 128 descriptors here")
def test_the_soft_limit_becomes_the_hard_one() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=60)


def test_it_is_said_once_until_there_are_enough_again(caplog: pytest.LogCaptureFixture) -> None:
    watch = DescriptorWatch(100)
    with caplog.at_level(logging.WARNING, "swarmnet.net.descriptors"):
        for free in (5, 89, 90, None, 95):
            watch.look(free)
        assert len(caplog.records) == 1
        watch.look(50)
        watch.look(None)
    assert [record.message for record in caplog.records] == ["descriptors_run_out"] * 2
