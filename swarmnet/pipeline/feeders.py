"""Who may bring a microbatch to a stage: rule 1 of docs/protocol.md, decided before its payload is read. Pure.

Stage k > 0 is fed by members of stage k - 1, stage 0 by trainers: what those send is proven (`pipeline.windows`), what
the others send cannot be. Where the facts about a caller come from is the replica's concern.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarmnet.messages import Process


@dataclass(frozen=True, slots=True)
class Known:
    """What a replica knows of a caller right now.

    feeds: a live member of the stage before, or another stage of this very peer. mate: a live member of the same stage.
    heard: it was heard as a replica of the stage before, and is silent, or without its state. admitted: the run takes
    it as a trainer.
    """

    feeds: bool = False
    mate: bool = False
    heard: bool = False
    admitted: bool = False


@dataclass(frozen=True, slots=True)
class TurnedAway:
    """Why a caller may not feed, in words for a person. soon: one more heartbeat may change that, so it is to wait."""

    reason: str
    soon: bool = False


def may_feed(caller: Known, request: Process) -> TurnedAway | None:
    """None if the caller may bring this microbatch to `request.stage`."""
    if request.stage == 0:
        if request.purpose == "eval" or caller.admitted or caller.mate:
            return None  # an evaluation is nobody's privilege: it counts nothing
        return TurnedAway("the run has not admitted you as a trainer: ask its owner for an invitation")
    if caller.feeds or (caller.mate and request.repair):
        return None
    before = f"a replica of stage {request.stage - 1}"
    if caller.heard:
        return TurnedAway(f"you are known as {before}, but silent or without its state for now", soon=True)
    return TurnedAway(f"you are not known here as {before}, and nobody else feeds stage {request.stage}")
