"""What many peers are told is written once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarmnet.ids import Chain
from swarmnet.messages import Heartbeat, Stamp
from swarmnet.net import grpc_link
from swarmnet.net.grpc_link import MessageWriter, Outbox
from swarmnet.wire.convert import read_control, write_control

CHAIN = Chain("1" * 64)


def test_the_same_object_is_written_once_and_an_equal_one_that_is_another_is_not_mistaken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[object] = []
    monkeypatch.setattr(grpc_link, "write_control", lambda message: written.append(message) or write_control(message))
    write = MessageWriter()
    boxes = [Outbox(4, write) for _ in range(5)]
    first = Heartbeat(Stamp(3, 0, CHAIN), 1, True, None, before=CHAIN)
    second = replace(first, queue=2)
    for box in boxes:
        box.put(first)
        box.put(second)
    assert written == [first, second]
    assert all([read_control(box.pop()), read_control(box.pop())] == [first, second] for box in boxes)


def test_what_was_written_long_ago_is_forgotten() -> None:
    write = MessageWriter()
    first = Heartbeat(Stamp(3, 0, CHAIN), 1, True, None, before=CHAIN)
    data = write(first)
    assert write(first) is data
    for queue in range(20):
        write(replace(first, queue=queue))
    assert write(first) == data and len(write._lately) == 8
