"""What the open steps of a replica share, and what outlives them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from swarmnet.ids import Chain, PeerId
from swarmnet.manifest.extension import Horizon
from swarmnet.messages import UNMEASURED, Commit, LineQuality, Trouble
from swarmnet.step.gate import Shape
from swarmnet.step.host import StepHost
from swarmnet.step.lateness import Lateness
from swarmnet.step.ledger import Generations
from swarmnet.step.lines import BrokenLines
from swarmnet.step.membership import Membership
from swarmnet.step.pace import Pace
from swarmnet.step.view import View


@dataclass(slots=True)
class StepContext:
    """One per replica, of `me`."""

    me: PeerId
    shape: Shape
    view: View
    membership: Membership
    host: StepHost
    generations: Generations
    numbers: Iterator[int]
    """The numbers of the rounds that I open (`ledger.round_numbers`)."""
    term_chain: Chain
    """The chain at the start of the keepers' term: the order of keepers follows from it."""
    overruled_by: PeerId | None = None
    """Who kept the step before while I thought that I did, and did not follow me."""
    synced: bool = False
    """Do I have state? Without it I take no part in the step."""

    line: LineQuality = UNMEASURED
    """What I have measured of my own network line."""
    trouble: Trouble | None = None
    """What holds me up in the round I take part in."""
    waits: Mapping[PeerId, bool] = field(default_factory=dict)
    """Members that I wait for in the round. True: the stream breaks each time that I request it."""
    awaited: frozenset[PeerId] = frozenset()
    """Members whose streams are later than their measured lines explain."""

    lines: BrokenLines = field(default_factory=BrokenLines)
    """Pairs of members between which nothing came through; a keeper uses it."""
    horizon: Horizon = field(init=False)
    """How many steps the run has, by the notices in force at this version."""
    pace: Pace = field(init=False)
    lateness: Lateness = field(init=False)
    """Which peers were late, as I have observed it."""

    def __post_init__(self) -> None:
        self.horizon = Horizon(self.shape.total_steps)
        self.pace = Pace(self.view.timers)
        self.lateness = Lateness(self.view.timers, self.host)

    def over(self, step: int) -> bool:
        """Is that step none of the run's, as far as can be foreseen?"""
        return step >= self.shape.notices.last(self.horizon)

    def notice(self, step: int) -> str:
        """What a round of that step names; empty: nothing that is known here begins at it."""
        due = self.shape.notices.due(step, self.horizon)
        return due.text if due is not None else ""

    def horizon_of(self, step: int, commits: Iterable[Commit]) -> Horizon:
        """What holds in step `step`, which these commits end."""
        learn = self.shape.notices.learn
        return self.horizon.after(step, [learn(commit.notice) for commit in commits if commit.notice])

    def stuck(self, *, now: float) -> bool:
        """Is my exchange unable to end by itself? A stream stands still, breaks, or comes from a dead member."""
        return self.trouble is not None or any(
            broken or not self.view.may_live(peer, now=now) for peer, broken in self.waits.items()
        )
