"""How this package waits between attempts: pauses that grow, within a bound."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from pg_cdc_source.errors import TransientError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses of ``first_seconds``, then each ``growth`` times the one before, none above ``longest_seconds``.

    They end after ``within_seconds``, or when ``attempts`` have been made, the first one included. The first attempt is
    always made, and the last pause is cut so that the last attempt falls on the bound.
    """

    first_seconds: float
    growth: float = 2.0
    longest_seconds: float = math.inf
    within_seconds: float = math.inf
    attempts: int | None = None

    def pauses(self) -> Iterator[float]:
        """The seconds to wait before each further attempt. The time of ``within_seconds`` begins with this call."""
        return self._pauses_until(time.monotonic() + self.within_seconds)

    def _pauses_until(self, deadline: float) -> Iterator[float]:
        pause_seconds = min(self.first_seconds, self.longest_seconds)
        for _ in itertools.count() if self.attempts is None else range(self.attempts - 1):
            left_seconds = deadline - time.monotonic()
            if left_seconds <= 0:
                return
            yield min(pause_seconds, left_seconds)
            pause_seconds = min(self.growth * pause_seconds, self.longest_seconds)

    def polls(self) -> Iterator[None]:
        """Yield at once, and again after each pause. A loop over it that ends has reached the bound."""
        pauses = self.pauses()
        yield
        for pause_seconds in pauses:
            time.sleep(pause_seconds)
            yield

    def retrying(
        self,
        action: Callable[[], T],
        after: type[TransientError] = TransientError,
        but: tuple[type[TransientError], ...] = (),
    ) -> T:
        """The result of ``action``, which is run again after an error ``after``, ``but`` these; the last is raised."""
        pauses = self.pauses()
        while True:
            try:
                return action()
            except after as error:
                pause_seconds = None if isinstance(error, but) else next(pauses, None)
                if pause_seconds is None:
                    raise
            time.sleep(pause_seconds)
