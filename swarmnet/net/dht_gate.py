"""What a DHT node takes in: a validator that only genuine records pass, and storage with a bound.

hivemind asks the validator about everything others store here and everything they answer, so it is also where news is
heard: each genuine announcement is handed to `heard`, whether or not the lookup it came with ever finishes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from hivemind.dht.crypto import DHTRecord, RecordValidatorBase
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage
from hivemind.utils import MSGPackSerializer

from swarmnet.errors import BadMessage
from swarmnet.net.records import MAX_AHEAD_S, Announcement, unseal

GRACE_S = 30.0                      # others' clocks: one stale entry must not void all that came with it
MAX_KEYS = 4096
MAX_ENTRIES_PER_KEY = 1024
MAX_REMEMBERED = 4096


class RecordGate(RecordValidatorBase):  # type: ignore[misc]
    """Passes `{key: {peer id: sealed record}}` entries whose seal fits key, subkey and expiry; never raises."""

    def __init__(self, heard: Callable[[Announcement], None], *, clock: Callable[[], float] = time.time) -> None:
        self._heard, self._clock = heard, clock
        self._verified: dict[bytes, Announcement] = {}       # renewals are read many times: verify each once

    def validate(self, record: DHTRecord) -> bool:
        """Whether `record` may be stored or believed."""
        if not isinstance(record.value, bytes) or not isinstance(record.expiration_time, int | float):
            return False
        if not math.isfinite(record.expiration_time):
            return False
        try:
            found = self._unseal(record.value)
        except BadMessage:
            return False
        genuine = (
            record.key == DHTID.generate(source=found.key).to_bytes()
            and record.subkey == MSGPackSerializer.dumps(found.record.peer)
            and round(record.expiration_time * 1000) == found.expiry_ms
        )
        if genuine:
            self._heard(found)
        return genuine

    def _unseal(self, data: bytes) -> Announcement:
        now = self._clock()
        found = self._verified.get(data)
        if found is None or not now - GRACE_S < found.expiry_ms / 1000 <= now + MAX_AHEAD_S:
            found = unseal(data, now=now, grace_s=GRACE_S)
            if len(self._verified) >= MAX_REMEMBERED:
                self._verified.clear()
            self._verified[data] = found
        return found


class BoundedStorage(DHTLocalStorage):  # type: ignore[misc]
    """A node's share of the DHT: full means refused, so a flood cannot push out what is there.

    `favoured` keys (this node's own run) find room even when strangers' keys fill the storage.
    """

    def __init__(self, favoured: Callable[[DHTID], bool], *, max_keys: int = MAX_KEYS) -> None:
        super().__init__()
        self._favoured, self._max_keys = favoured, max_keys

    def store_subkey(self, key: DHTID, subkey: object, value: object, expiration_time: float) -> bool:
        """As hivemind's, within the bound. (Nothing without a subkey passes the gate.)"""
        held = self.get(key)
        if held is None:
            if len(self) >= self._max_keys and not self._favoured(key):
                return False
        elif subkey not in held.value and len(held.value) >= MAX_ENTRIES_PER_KEY:
            return False
        stored: bool = super().store_subkey(key, subkey, value, expiration_time)
        return stored
