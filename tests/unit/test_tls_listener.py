"""What a listener answers when gRPC asks for its certificate, which it does at every connection of anybody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from swarmnet.net.identity import Identity
from swarmnet.net.tls import LEAF_LIFE_S, Leaf


def test_a_listener_is_given_a_certificate_once_and_again_only_when_it_was_reissued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new answer makes gRPC free the old one under a concurrent handshake: one per connection crashed peers."""
    now, given = 1_800_000_000.0, {}

    def capture(initial: Any, fetch: Any, **options: Any) -> None:
        given.update(initial=initial, fetch=fetch, **options)

    monkeypatch.setattr(grpc, "dynamic_ssl_server_credentials", capture)
    identity = Identity.load_or_create(tmp_path / "identity.key")
    leaf = Leaf(identity, clock=lambda: now)
    leaf.listener_credentials()
    assert given["initial"] is not None and given["require_client_authentication"]
    assert [given["fetch"]() for _ in range(3)] == [None, None, None]
    now += LEAF_LIFE_S / 2
    assert given["fetch"]() is not None
    assert [given["fetch"]() for _ in range(3)] == [None, None, None]
