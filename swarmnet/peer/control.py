"""What the operator of a running peer asks of it, and what the peer has done so far. Pure: requests and the time in,
answers out; `peer.control_socket` carries them and keeps both on disk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from swarmnet.config.check import SettingsLayer, resolve
from swarmnet.config.peer import Caps, Hours, PeerConfig
from swarmnet.config.table import CliOption
from swarmnet.errors import UsageError
from swarmnet.telemetry.run_state import RunState
from swarmnet.telemetry.text import counted, size

ASKS = ("pause", "resume", "drain", "limits", "stats", "links")
"""What can be asked: all but `links` by the command of `swarmnet control` of that name, `links` by `dashboard`."""

_LIVE = [
    name
    for name, option in Caps.model_fields.items()
    if any(isinstance(each, CliOption) and each.live for each in option.metadata)
]
"""Of the limits, those that can be changed while a peer runs, as `slots` can."""


# ---------------------------------------------------------------- what it has done


@dataclass(slots=True)
class WorkDone:
    """What a peer has done, over all its lives in one directory."""

    since: float
    """Unix seconds of its first start."""
    microbatches: int = 0
    """Counted: they are in sums that were committed."""
    steps: int = 0
    """Applied, of all its stages."""
    seconds: float = 0.0
    """With state, and not paused."""
    sent: int = 0
    received: int = 0

    @classmethod
    def parse(cls, data: object) -> WorkDone:
        """What was kept. Raises ValueError."""
        usual = asdict(cls(0.0))
        if not isinstance(data, dict) or data.keys() != usual.keys():
            raise ValueError("it names other things")
        for name, value in data.items():
            if isinstance(value, bool) or not isinstance(value, (int, type(usual[name]))) or not 0 <= value < 1e18:
                raise ValueError(f"{name} is no amount")
        return cls(**data)

    def words(self, day: str) -> str:
        """In a line. day: of `since`."""
        return (
            f"{counted(self.microbatches, 'microbatch')} counted, {counted(self.steps, 'step')} applied, "
            f"{_time(self.seconds)} served, "
            f"{size(self.sent)} sent and {size(self.received)} received since {day}"
        )


def _time(seconds: float) -> str:
    return f"{seconds / 3600:,.1f} h" if seconds >= 3600 else f"{seconds / 60:.0f} min"


@dataclass(slots=True)
class WorkCount:
    """Adds what this process does to what was kept: its own counts begin at 0."""

    kept: WorkDone
    _before: tuple[int, ...] = (0, 0, 0, 0)

    def passed(self, seconds: float, state: RunState, sent: int, received: int, *, serving: bool) -> None:
        """So many seconds have passed. state, sent, received: all that was done since the process began."""
        self.kept.seconds += seconds if serving else 0.0
        stages = state.stages.values()
        done = sum(each.new_contributed for each in stages), sum(each.new_steps for each in stages), sent, received
        for name, now, before in zip(("microbatches", "steps", "sent", "received"), done, self._before, strict=True):
            setattr(self.kept, name, getattr(self.kept, name) + now - before)
        self._before = done


# ---------------------------------------------------------------- what is asked of it


@dataclass(frozen=True, slots=True)
class Reply:
    """To one request: a line for a person, the same as facts; what was asked is in force then. leave: now. change: of
    the peer config."""

    words: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    leave: bool = False
    change: Mapping[str, Any] = field(default_factory=dict)


class Control:
    """Answers requests. config: what the peer was started with. paused: has its operator asked it to pause?"""

    def __init__(self, config: PeerConfig, tally: WorkCount, *, paused: bool) -> None:
        self.config, self.tally, self.paused = config, tally, paused
        self.links: Sequence[str] = ()
        """By which others join, those of this machine alone last."""

    def pauses(self, minute: int) -> str:
        """Why the peer is to be paused in this minute of the day, in words; "" if it is not."""
        if self.paused:
            return "as asked: `swarmnet control resume` ends it"
        hours = self.config.caps.hours
        if hours and not Hours.parse(hours).includes(minute):
            return f"outside caps.hours = {hours}"
        return ""

    def answer(self, request: object, *, minute: int, day: str, leaves: bool = False) -> Reply:
        """Raises UsageError, in words that say what to do. minute: of the day. day: on which the peer first started.
        leaves: has it been asked to?"""
        match request:
            case {"ask": "pause"}:
                self.paused = True
                words = "it takes no new microbatches, unless no other peer has its stage's state; it keeps in sync"
                return Reply(f"paused: {words}")
            case {"ask": "resume"}:
                was = bool(self.pauses(minute))
                self.paused = False
                still = self.pauses(minute)
                words = f"it stays paused, {still}" if still else "resumed" if was else "it was not paused"
                return Reply(words, {"paused": bool(still)})
            case {"ask": "drain"} if leaves:
                return Reply("it leaves already; its log says what it waits for")
            case {"ask": "drain"}:
                return Reply(
                    "it leaves, as at the first Ctrl+C, when another replica has its state or drain_s is over; its log "
                    "says what it waits for",
                    leave=True,
                )
            case {"ask": "limits", "change": dict() as change}:
                return self._limits(change)
            case {"ask": "stats"}:
                return Reply(self.tally.kept.words(day), asdict(self.tally.kept))
            case {"ask": "links"} if self.links:
                return Reply(self.links[-1], {"links": list(self.links)})
            case {"ask": "links"}:
                raise UsageError("this peer has no address at which others could join: name the run by its link")
        raise UsageError(f"this peer knows {', '.join(ASKS)}: is its swarmnet of another version?")

    def _limits(self, change: Mapping[str, Any]) -> Reply:
        if change:
            within = change.get("caps", {})
            if not (change.keys() <= {"slots", "caps"} and isinstance(within, dict) and within.keys() <= {*_LIVE}):
                raise UsageError(f"slots, {', '.join(_LIVE)} can be changed while a peer runs, nothing else")
            # Checked with all the rest, as if it had been in the file.
            said = [SettingsLayer("now", self.config.model_dump(mode="json")), SettingsLayer("limits", change)]
            self.config = resolve(PeerConfig, said, where="limits")
        caps = self.config.caps
        facts = {"slots": self.config.slots, **caps.model_dump(include={*_LIVE})}
        words = [
            f"upload {_limit(caps.upload_mbit, 'Mbit/s')}",
            f"download {_limit(caps.download_mbit, 'Mbit/s')}",
            f"GPU memory {_limit(caps.gpu_gib, 'GiB')}",
            f"host memory {_limit(caps.host_gib, 'GiB')}",
            f"disk {_limit(caps.disk_gib, 'GiB')}",
            f"slots {self.config.slots or 'as many as fit'}",
            f"hours {caps.hours or 'all day'}",
        ]
        return Reply(", ".join(words), facts, change=change)


def _limit(amount: float, unit: str) -> str:
    return f"{amount:g} {unit}" if amount else "no limit"
