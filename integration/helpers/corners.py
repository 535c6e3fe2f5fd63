"""Cases of a test of which only some are run on the oldest versions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def cases(every: Iterable[Any], *corners: Any) -> list[Any]:
    """The cases for ``parametrize``, of which ``corners`` are marked so. A tuple has a value for each name."""
    every = list(every)
    assert set(corners) <= set(every), corners
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=[pytest.mark.corner] * (case in corners))
        for case in every
    ]
