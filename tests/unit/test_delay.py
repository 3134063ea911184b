"""On which weights a step is computed, and so which steps are open."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarmnet.manifest.schema import Averaging, Delay

delays = st.builds(Delay, most=st.integers(0, 1), since=st.integers(0, 9))


@given(delays, st.integers(0, 12))
def test_the_newest_open_step_is_computed_on_the_weights_of_the_version(delay: Delay, version: int) -> None:
    newest = version + delay.ahead(version)
    assert newest - delay.behind(newest) == version


@given(delays)
def test_every_step_opens_at_the_version_of_its_weights_and_stays_open_until_it_is_applied(delay: Delay) -> None:
    open_at = {version: range(version, version + delay.ahead(version) + 1) for version in range(12)}
    for step in range(10):
        found = [version for version, steps in open_at.items() if step in steps]
        assert found == list(range(max(step - delay.behind(step), 0), step + 1))


def test_exact_is_never_late_and_overlap_from_the_manifests_step_on() -> None:
    assert Averaging(sync="exact").delay.most == 0
    late = Averaging(sync="overlap", overlap_after=7).delay
    assert [late.behind(step) for step in (0, 6, 7, 99)] == [0, 0, 1, 1]
