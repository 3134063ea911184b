"""Where DHT nodes were last met: the way back into the swarm, also after a restart.

A bounded list, newest first, in one JSON file that is replaced atomically. What it says is a hint: an address is
dialled under the peer id it ends in, so a wrong one fails and costs nothing else.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

from swarmnet.errors import UsageError
from swarmnet.ids import PeerId
from swarmnet.net.address import Address

MAX_PEERS = 64
MAX_ADDRESSES_PER_PEER = 4
_MAX_FILE_BYTES = 256 * 1024


class KnownPeers:
    """Multiaddrs by peer, most recently met last. `path` None: in memory only."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._addresses: dict[PeerId, tuple[str, ...]] = {}
        self._saved: dict[PeerId, tuple[str, ...]] = {}
        for entry in reversed(_read(path)):
            self.met([entry])
        self._saved = dict(self._addresses)

    def met(self, addresses: Iterable[str]) -> None:
        """A peer is (or says it is) at `addresses`, all of one peer; unusable ones are skipped."""
        peers = [(address, peer) for address in addresses if (peer := peer_in(address)) is not None]
        for peer in {peer for _, peer in peers}:
            now_at = [address for address, owner in peers if owner == peer]
            before = [address for address in self._addresses.pop(peer, ()) if address not in now_at]
            self._addresses[peer] = tuple((now_at + before)[:MAX_ADDRESSES_PER_PEER])
        while len(self._addresses) > MAX_PEERS:
            del self._addresses[next(iter(self._addresses))]

    def addresses(self) -> tuple[str, ...]:
        """All of them, most recently met peer first."""
        return tuple(address for peer in reversed(self._addresses) for address in self._addresses[peer])

    def save(self) -> None:
        """Replace the file if anything changed. Raises OSError."""
        if self._path is None or self._addresses == self._saved:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        draft = self._path.with_name(f".{self._path.name}.{secrets.token_hex(4)}")
        try:
            draft.write_text(json.dumps({"known_peers": self.addresses()}, indent=1) + "\n")
            os.replace(draft, self._path)
        finally:
            draft.unlink(missing_ok=True)
        self._saved = dict(self._addresses)


def peer_in(address: str) -> PeerId | None:
    """The peer id a dialable multiaddr ends in, or None."""
    try:
        return Address.parse(address).peer
    except UsageError:
        return None


def _read(path: Path | None) -> list[str]:
    """The file's addresses; a missing, foreign or broken file has none."""
    if path is None:
        return []
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(_MAX_FILE_BYTES))
    except (OSError, ValueError, RecursionError):
        return []
    entries = content.get("known_peers") if isinstance(content, dict) else None
    return [entry for entry in entries if isinstance(entry, str)] if isinstance(entries, list) else []
