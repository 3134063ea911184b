"""Who has contributed how much to a run: a table made of records. Pure.

The amounts are what peers say of themselves, since their processes began. What a peer can prove is in its contribution
receipts (`audit.receipts`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from swarmnet.directory import Record
from swarmnet.ids import PeerId
from swarmnet.telemetry.text import printable, short

_MOST_STAGES = 3
"""That are named in words."""


@dataclass(frozen=True, slots=True)
class Contributor:
    """A row. accepted: microbatches in committed aggregates, of all its stages. share: of all that are in the table.
    nickname: empty: it has none."""

    peer: PeerId
    nickname: str
    stages: tuple[int, ...]
    accepted: int
    share: float

    @property
    def name(self) -> str:
        """To show to a person. With the end of its id, since a nickname is not unique."""
        return printable(f"{self.nickname} {short(self.peer)}".strip())

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """For a table: name, stages, accepted microbatches, share."""
        more = len(self.stages) - _MOST_STAGES
        stages = ",".join(map(str, self.stages[:_MOST_STAGES])) + (f",+{more}" if more > 0 else "")
        return self.name, stages, f"{self.accepted:,}", f"{self.share:.1%}"


HEAD = ("contributor", "stage", "accepted", "share")


def contributors(records: Iterable[Record]) -> tuple[Contributor, ...]:
    """Who has contributed anything, the most first."""
    serving = [(record, sum(status.counted for status in record.stages)) for record in records]
    # A microbatch is accepted once in each stage, so the amounts of all stages add up to the work of the run.
    whole = sum(accepted for _, accepted in serving)
    rows = [
        Contributor(
            record.peer,
            record.nickname,
            tuple(sorted(status.stage for status in record.stages)),
            accepted,
            accepted / whole,
        )
        for record, accepted in serving
        if accepted
    ]
    return tuple(sorted(rows, key=lambda row: (-row.accepted, row.peer)))
