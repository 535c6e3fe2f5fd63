"""How many examples a property is tried with."""

from __future__ import annotations

import os

from hypothesis import settings

# No test is derandomised, so that runs one after another look at different examples. EXAMPLES=1 tries all of them.
SHARE = float(os.environ.get("EXAMPLES", "0.4"))
# Of a property that takes long, the share would be too few.
_LEAST = 10


def examples(count: int) -> settings:
    """Settings of a property's test: this many examples, or a share of them."""
    return settings(max_examples=max(min(count, _LEAST), round(count * SHARE)))
