"""Errors as users see them: what PySpark shows of a refusal, and that it is short and says what to do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pyspark.errors import PySparkException

# Spark shows the whole stack. These frames are the edge to it: the method that Spark calls, and what it goes through.
MOST_FRAMES = 3


def refusal(action: Callable[[], object], *expected: str) -> str:
    """Return the text of the exception that ``action`` raises; it has a remedy and holds what is ``expected``."""
    with pytest.raises(PySparkException) as caught:
        action()
    text = str(caught.value)
    own_frames = [line for line in text.splitlines() if line.lstrip().startswith("File ") and "pg_cdc_source/" in line]
    assert len(own_frames) <= MOST_FRAMES, text
    assert text.count("Remedy: ") == 1, text
    for part in expected:
        assert part in text, text
    return text
