"""The page of theory on top of `swarmnet.step` shows the tables that the code reads."""

from __future__ import annotations

import inspect

import swarmnet.step
from swarmnet.ids import PeerId
from swarmnet.step.host import Deferred
from swarmnet.step.leader import DUTIES
from swarmnet.step.ledger import CLAIMS
from swarmnet.step.open_step import PHASES, RoundPart


def rows_after(sentence: str) -> list[list[str]]:
    """The rows of the page's table that follows this sentence, without its head."""
    _, page = inspect.getdoc(swarmnet.step).split(sentence)
    lines = page[page.index("|") :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_page_shows_the_phases_of_a_step():
    rows = rows_after("follows `open_step.PHASES`")
    shown = {(phase, event): to for event, phases, to, _ in rows for phase in phases.split(", ")}
    assert shown == PHASES


def test_the_page_shows_the_events_of_a_claim_and_the_phases_of_a_term():
    assert [row[0] for row in rows_after("follows `ledger.CLAIMS`")] == [*dict.fromkeys(event for _, event in CLAIMS)]
    assert {phase for phase, _ in DUTIES} < {row[0] for row in rows_after("A leader's term")}


def test_an_event_without_a_row_changes_nothing():
    part = RoundPart(PeerId("A"), Deferred())
    assert not part.move("complete") and not part.move("apply") and part.phase == "counting"
