"""Which described copies a replica has use for, and how often it says why it got none."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from donor_bench import header_at
from restorers import restorer

from swarmnet.errors import BadMessage, NoReplica, PeerGone, Refused
from swarmnet.ids import NO_RESTART, PeerId, Restart
from swarmnet.messages import Content, Snapshot
from swarmnet.step.gate import Shape

LAST = 20


class Restored:
    """A joining replica without a swarm. Stands for its engine."""

    def snapshot_bytes(self, stage: int) -> int:
        return 4

    def __init__(self, restart: Restart = NO_RESTART) -> None:
        self.said: list[dict[str, object]] = []
        parts = {"compute": self, "member": SimpleNamespace(restart=restart), "exchange": None}
        self.machine = restorer(0, Shape(2, 4, LAST), event=lambda event, fields: self.said.append(fields), **parts)


def copy(version: int, restart: Restart) -> Snapshot:
    return Snapshot(0, replace(header_at(version), restart=restart), Content(0, 1, b""))


HERE = Restart(2, 8)


@pytest.mark.parametrize(
    ("version", "restart", "asked", "error"),
    [
        (8, HERE, -1, None),
        (15, HERE, -1, None),
        (15, NO_RESTART, -1, Refused),  # the newest of a past that was given up
        (8, NO_RESTART, -1, Refused),  # as good as any, but its donor does not go on from there
        (15, Restart(3, 12), -1, Refused),  # its donor knows more than I do: I shall hear of it
        (8, NO_RESTART, 8, None),  # from a disk, and asked for by number
        (4, Restart(1, 4), 4, None),
        (12, Restart(1, 4), 12, Refused),  # what that disk holds beyond has been given up
        (12, HERE, 12, None),
        (LAST, HERE, -1, None),
        (LAST + 1, HERE, -1, BadMessage),
        (LAST + 1, HERE, LAST + 1, BadMessage),
    ],
)
def test_only_a_copy_of_the_present_is_of_use(
    version: int, restart: Restart, asked: int, error: type[Exception] | None
) -> None:
    found = Restored(HERE).machine.unfit(copy(version, restart), asked)
    assert found is None if error is None else isinstance(found, error)


def test_why_there_is_no_state_is_said_once_for_each_reason() -> None:
    restored = Restored()
    for asked in (1, 2, 3):
        restored.machine.say_given_up(NoReplica("no peer hands over a copy", asked=asked))
        restored.machine.say_given_up(NoReplica("nobody says what came next", version=asked))
        for donor in (PeerId("a"), PeerId("b")):
            restored.machine.say_failed(donor, PeerGone("broken", at=asked))
    assert len(restored.said) == 4
