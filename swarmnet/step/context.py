"""What all open steps of a replica have in common: it outlives each of them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from swarmnet.ids import Chain, PeerId
from swarmnet.messages import UNMEASURED, LinkQuality, Trouble
from swarmnet.step.gate import Shape
from swarmnet.step.ledger import Generations
from swarmnet.step.membership import Membership
from swarmnet.step.strikes import Strikes
from swarmnet.step.view import BrokenLinks, Pace, View


@dataclass(slots=True)
class StepContext:
    """One per replica, of `me`."""

    me: PeerId
    shape: Shape
    view: View
    membership: Membership
    generations: Generations
    numbers: Iterator[int]
    """Of the rounds that I open (`round_numbers`)."""
    term_chain: Chain
    """At the start of the keepers' term: the order of keepers follows from it."""
    synced: bool = False
    """Have I state, and so a say?"""

    line: LinkQuality = UNMEASURED
    """What I have measured of my line."""
    trouble: Trouble | None = None
    """What holds me up in the round I take part in."""
    waits: Mapping[PeerId, bool] = field(default_factory=dict)
    """For whom I wait there; True: whose stream breaks whenever it is asked for."""
    awaited: frozenset[PeerId] = frozenset()
    """Whose streams are later there than their lines need."""

    absent: frozenset[PeerId] = frozenset()
    """Mates that had no part in the step before."""
    lines: BrokenLinks = field(default_factory=BrokenLinks)
    """What I know of others' lines, as a keeper."""
    pace: Pace = field(init=False)
    strikes: Strikes = field(init=False)
    """What I hold against others as members."""
    vain: Strikes = field(init=False)
    """The same, as keepers."""

    def __post_init__(self) -> None:
        self.pace = Pace(self.view.timers)
        self.strikes, self.vain = Strikes(self.view.timers), Strikes(self.view.timers)

    def stuck(self, *, now: float) -> bool:
        """Can the exchange I take part in not end by itself? Its streams stand still or break, or end at the dead."""
        return self.trouble is not None or any(
            broken or not self.view.alive(peer, now=now) for peer, broken in self.waits.items()
        )
