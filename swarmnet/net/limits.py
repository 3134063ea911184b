"""How often others may have this peer do something, and how long it pauses after failures: all of it, in one table.

A rate is a token bucket's (`pacing.Rate`): tokens a second, and for how many seconds they gather. Identities cost
nothing, so what a peer does for one identity is also bounded for its host, or for all of them. What is bounded by
memory, and not by time, is bounded where it is kept.
"""

from __future__ import annotations

import math
from functools import partial

from swarmnet.pacing import Backoff, Rate

# ---------------------------------------------------------------- dials of addresses that others name

HOST_DIALS = Rate.every(0.5, at_once=16)
"""Of one host, at addresses where the peer has not answered. Those where it answers do not count."""
HOST_PUNCHES = Rate.every(2.0, at_once=4)
"""In which one host is dialled; of those that others ask for, and of my own. Many homes share a carrier's address."""
DIAL_BACKS = Rate.every(5.0)
"""For one caller, and to one address."""
BULK_JUNK = Rate(4.0, burst_s=4.0)
"""Connections to the bulk port from one host that prove nothing."""

# ---------------------------------------------------------------- what one caller asks

BULK_SESSIONS = Rate(1.0, burst_s=8.0)
"""Each replaces the caller's last one."""
HISTORIES = Rate(20.0, burst_s=2.0)
"""By all callers together. The longest answer takes 2 ms of computing."""
DHT_CALLS = Rate(50.0, burst_s=4.0)
DHT_KEYS = Rate(1.0, burst_s=4.0)
"""In seconds of the keys that a caller may touch in one (`dht_node.PacedP2P`)."""
MESSAGES = Rate(1000.0, burst_s=4.0)
MESSAGE_BYTES = Rate(4 << 20, burst_s=4.0)
"""On links, where a run does not say how large it is."""

# ---------------------------------------------------------------- relays

RELAY_ASKS = Rate(2.0, burst_s=15.0)
"""Of one identity, whatever it asks; and of summons to one peer, from one home."""
RELAY_SUMMONS = Rate(8.0, burst_s=15.0)
"""To one peer, from all callers together; and of one peer's arrivals."""
SUMMONS_OF_RELAY = Rate(8.0, burst_s=30.0)
"""That a hidden peer follows: what the relay lets through, and as many again after a stall."""

# ---------------------------------------------------------------- what this peer does by itself

LOOK_UPS = Rate.every(5.0)
"""Of one peer's record."""
IN_VAIN = Rate.every(60.0)
"""Connect-back requests to one peer that did not connect directly, through one relay."""
REPEATS = Rate.every(600.0)
"""Of one line in the log, while what it says lasts."""
COMPLAINTS, ALL_COMPLAINTS = Rate.every(60.0), Rate(0.5, burst_s=60.0)
"""Log lines about one kind of fault of one caller, and about all callers."""
REFUSALS_TOLD = Rate.every(60.0)
"""Lines about callers that a hidden peer does not come to."""

# ---------------------------------------------------------------- pauses after failures: the first, the longest

DIAL_FIRST_S, DIAL_SHOWN_S, DIAL_NAMED_S, DIAL_OF_ALL_S = 0.05, 3.0, 30.0, 1.0
"""The first pause, and the longest: of a peer at an address where it has answered, at one that it only names, and of
all who name one address."""
DIAL_AGAIN = partial(Backoff, DIAL_FIRST_S, DIAL_NAMED_S)
DIAL_OF_ALL_AGAIN = partial(Backoff, DIAL_FIRST_S, DIAL_OF_ALL_S)
LINK_AGAIN = partial(Backoff, 0.05, 3.0, jitter=0.5)
"""At random, so that the peers of one that restarted do not all come back at once."""
PUNCH_AGAIN = partial(Backoff, 5.0, 600.0)
"""With one peer."""
BULK_AGAIN = partial(Backoff, 1.0, 300.0)
ASK_AROUND_AGAIN = partial(Backoff, 3.0, 60.0)
"""Whether others can connect to this peer, until one of them can tell."""
BOOTSTRAP_AGAIN = partial(Backoff, 1.0, 30.0, jitter=0.2)
REJOIN_AGAIN = partial(Backoff, 1.0, math.inf, jitter=0.2)
"""The longest is a third of a record's life."""
