"""Who may bring a microbatch to which stage: the whole table."""

from __future__ import annotations

import itertools

import pytest

from swarmnet.messages import Process
from swarmnet.pipeline.inputs import TurnedAway, may_feed

STRANGER = dict.fromkeys(("feeds", "replica", "known", "admitted"), False)


@pytest.mark.parametrize("facts", itertools.product([False, True], repeat=4), ids=str)
def test_the_table(facts: tuple[bool, ...]) -> None:
    known = dict(zip(STRANGER, facts, strict=True))
    for stage, purpose, repair in itertools.product([0, 1, 5], ["train", "eval"], [False, True]):
        away = may_feed(Process(0, stage, 0, purpose, repair=repair), **known)
        if stage == 0:
            allowed = purpose == "eval" or known["admitted"] or known["replica"]
        else:
            allowed = known["feeds"] or (known["replica"] and repair)
        assert (away is None) == allowed
        if away is not None:
            assert away.reason and away.soon == (stage > 0 and known["known"])


def test_the_words_say_what_is_lacking() -> None:
    assert may_feed(Process(3, 2, 0), **{**STRANGER, "admitted": True}) == TurnedAway(
        "you are not known here as a replica of stage 1, and only those feed stage 2"
    )
    assert may_feed(Process(3, 0, 0), **STRANGER) == TurnedAway(
        "the run has not admitted you as a trainer: ask its owner for an invitation"
    )
