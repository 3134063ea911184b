"""Parameters of a test that run only under `--long`, beside those that run every time."""

from __future__ import annotations

import pytest


def further(*values: object) -> list[object]:
    """One parameter each; a tuple is one set of several."""
    return [pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=pytest.mark.long) for each in values]
