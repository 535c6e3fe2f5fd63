"""What a process may need again in a moment, and closes if it does not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Lingering(Generic[Item]):
    """Holds one item at most, for up to ``linger_seconds``; then ``close`` gets it. Any thread may use it."""

    def __init__(self, linger_seconds: float, close: Callable[[Item], None]) -> None:
        self._linger_seconds = linger_seconds
        self._close = close
        self._lock = threading.Lock()
        self._left: tuple[Item, float] | None = None  # until when: time.monotonic()
        self._watched = False  # a thread looks after what is left

    def leave(self, item: Item) -> None:
        """Leave an item to who asks next. One that was left before is closed."""
        left = item, time.monotonic() + self._linger_seconds
        with self._lock:
            before, self._left = self._left, left
            watched, self._watched = self._watched, True
        if not watched:
            self._start_watching()
        if before is not None:
            self._close(before[0])

    def _start_watching(self) -> None:
        try:
            threading.Thread(target=self._watch, name="pgsnapshot-left", daemon=True).start()
        except RuntimeError:
            # The process may have no more threads. Nothing is left where nobody looks after it.
            with self._lock:
                left, self._left, self._watched = self._left, None, False
            if left is not None:
                self._close(left[0])

    def take(self, fits: Callable[[Item], bool] = lambda _: True) -> Item | None:
        """The item that was left, if it fits; one that does not stays."""
        with self._lock:
            if self._left is None or not fits(self._left[0]):
                return None
            (item, _), self._left = self._left, None
            return item

    def _watch(self) -> None:
        """Close the item that nobody takes. Starting a thread for each task would cost a tenth of a small task."""
        while True:
            with self._lock:
                left = self._left
                rest = 0.0 if left is None else left[1] - time.monotonic()
                if rest <= 0:
                    self._left, self._watched = None, False
                    break
            time.sleep(rest)
        if left is not None:
            self._close(left[0])
