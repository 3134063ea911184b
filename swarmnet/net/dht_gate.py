"""What a DHT node takes in: a validator that only genuine records pass, and storage with a bound.

hivemind asks the validator about everything others store here and everything they answer, so it is also where news is
heard: each genuine announcement is handed to `heard`, whether or not the lookup it came with ever finishes. Lists of
bans (`net.admission`) travel the same way, under `{run}.bans`, each under the id of the owner who signed it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from swarmnet.errors import BadMessage
from swarmnet.net.admission import BANS, Bans
from swarmnet.net.hivemind_dht import DHTID, DHTLocalStorage, DHTRecord, MSGPackSerializer, RecordValidatorBase
from swarmnet.net.identity import verify
from swarmnet.net.record_table import gives_way
from swarmnet.net.records import MAX_AHEAD_S, Announcement, bans_key, unseal

GRACE_S = 30.0  # others' clocks: one stale entry must not void all that came with it
MAX_KEYS = 4096
MAX_ENTRIES_PER_KEY = 1024
MAX_REMEMBERED = 4096
MAX_BAN_LISTS = 256


class RecordGate(RecordValidatorBase):  # type: ignore[misc]
    """Passes `{key: {peer id: sealed record}}` entries whose seal fits key, subkey and expiry; never raises.

    heard_bans(list, expiry) is told of every genuine list of bans, whatever its run. welcome(what): may this node keep
    it? A run's own nodes refuse what is not admitted to their run; what they read they only ignore, since to hivemind
    one entry that does not pass spoils all that came with it.
    """

    def __init__(
        self,
        heard: Callable[[Announcement], None],
        *,
        clock: Callable[[], float] = time.time,
        heard_bans: Callable[[Bans, float], None] = lambda bans, expiry: None,
        welcome: Callable[[Announcement | Bans], bool] = lambda found: True,
    ) -> None:
        self._heard, self._clock, self._heard_bans, self._welcome = heard, clock, heard_bans, welcome
        self._verified: dict[bytes, Announcement] = {}  # renewals are read many times: verify each once
        self._bans: dict[bytes, Bans] = {}

    def validate(self, record: DHTRecord) -> bool:
        """Whether `record` may be stored or believed."""
        if not isinstance(record.value, bytes) or not isinstance(record.expiration_time, int | float):
            return False
        if not math.isfinite(record.expiration_time):
            return False
        if record.value.startswith(BANS.encode()):
            return self._validate_bans(record)
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

    def admits(self, value: object) -> bool:
        """Whether this node keeps what passed."""
        found = self._verified.get(value) or self._bans.get(value) if isinstance(value, bytes) else None
        return found is None or self._welcome(found)

    def _validate_bans(self, record: DHTRecord) -> bool:
        try:
            bans = self._bans.get(record.value) or Bans.parse(record.value.decode("ascii"))
        except ValueError:
            return False
        now = self._clock()
        genuine = (
            record.key == DHTID.generate(source=bans_key(bans.run)).to_bytes()
            and record.subkey == MSGPackSerializer.dumps(bans.owner)
            and now - GRACE_S < record.expiration_time <= now + MAX_AHEAD_S
            and (record.value in self._bans or verify(bans.owner, bans.signed, bans.signature))
        )
        if genuine:
            if len(self._bans) >= MAX_BAN_LISTS:
                self._bans.clear()
            self._bans[record.value] = bans
            self._heard_bans(bans, record.expiration_time)
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

    `favoured` keys (this node's own run) find room even when strangers' keys fill the storage. admits(value): whether
    it is kept at all; in a full key of ours a new one takes the place of the newest that would not be kept any more.
    """

    def __init__(
        self,
        favoured: Callable[[DHTID], bool],
        *,
        max_keys: int = MAX_KEYS,
        max_entries: int = MAX_ENTRIES_PER_KEY,
        admits: Callable[[object], bool] = lambda value: True,
    ) -> None:
        super().__init__()
        self._favoured, self._admits = favoured, admits
        self._max_keys, self._max_entries = max_keys, max_entries

    def store_subkey(self, key: DHTID, subkey: object, value: object, expiration_time: float) -> bool:
        """As hivemind's, within the bound. (Nothing without a subkey passes the gate.)"""
        if not self._admits(value):
            return False
        held = self.get(key)
        if held is None:
            if len(self) >= self._max_keys and not self._favoured(key):
                return False
        elif subkey not in held.value and len(held.value) >= self._max_entries:
            # A dictionary keeps the order in which entries came, however often they are renewed.
            there = {each: kept.value for each, kept in held.value.data.items()}
            loser = gives_way(there, self._admits) if self._favoured(key) else None
            if loser is None:
                return False
            del held.value[loser]
        stored: bool = super().store_subkey(key, subkey, value, expiration_time)
        return stored
