"""When a stream looks at its publication again.

What is done and undone between two looks is not seen, so looks come soon. Of thousands of tables, each look costs the
server some tenths of a second, and then they come less often, within a bound.
"""

from __future__ import annotations

import time
from collections import deque

# A look at few tables takes less. Where looks take n times as long, they are n times as far apart, up to a bound.
_QUICK_SECONDS = 0.1
_MOST = 5
# One that waits for a lock says nothing about others, so the quickest of these counts.
_COUNTED = 8
# When the log says for the first time that looks fail.
_SAY_SECONDS = 30.0


class LookPace:
    """Says when a look is due."""

    def __init__(self) -> None:
        self._due = 0.0  # by time.monotonic()
        self._took: deque[float] = deque(maxlen=_COUNTED)
        self._failing_since: float | None = None
        self._say_at = 0.0

    def is_due(self) -> bool:
        return time.monotonic() >= self._due

    def hurry(self) -> None:
        """The next look is due at once."""
        self._due = 0.0

    def rest(self, seconds: float) -> None:
        """The next look is due in so many seconds, or in up to five times as many where all of the last took long."""
        quickest = min(self._took) if len(self._took) == _COUNTED else 0.0
        self._due = time.monotonic() + seconds * min(max(quickest / _QUICK_SECONDS, 1.0), _MOST)

    def took(self, seconds: float) -> None:
        """A look has taken so long."""
        self._took.append(seconds)
        self._failing_since = None

    def failed(self) -> float | None:
        """A look has failed. Return for how many seconds all have, where it is time to say so: ever more rarely."""
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since, self._say_at = now, now + _SAY_SECONDS
        if now < self._say_at:
            return None
        seconds = now - self._failing_since
        self._say_at = now + seconds
        return seconds
