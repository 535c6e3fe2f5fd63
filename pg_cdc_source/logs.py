"""The loggers, and the variable that turns their lines on in processes that no user's code configures.

Each module logs under its own name: below ``pg_cdc_source.stream`` for the format pgcdc, ``pg_cdc_source.snapshot`` for
pgsnapshot, and below its own folder for what both have. Names, LSNs, counts and durations are logged, never a row's
value.
"""

from __future__ import annotations

import json
import logging
import os
import sys

ENVIRONMENT = "PG_CDC_LOG"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

log = logging.getLogger("pg_cdc_source")


class _Unclaimed(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to standard error what no other handler would get.

    Spark's own collector of worker logs (4.1 and later) and a user's configuration are handlers of the root logger.
    """

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            # Spark replaces it while a task runs.
            self.stream = sys.stderr
            super().emit(record)


def follow_environment() -> None:
    """Log as the environment says; where it says nothing, as Python does by itself."""
    level = os.environ.get(ENVIRONMENT, "").upper()
    if not level:
        return
    if not any(isinstance(handler, _Unclaimed) for handler in log.handlers):
        handler = _Unclaimed()
        handler.setFormatter(logging.Formatter(FORMAT))
        log.addHandler(handler)
    if level not in LEVELS:
        log.warning("%s=%s is none of %s; warnings and errors are logged", ENVIRONMENT, level, ", ".join(LEVELS))
        level = "WARNING"
    log.setLevel(level)


def fields(**values: object) -> str:
    """``key=value`` pairs, as log collectors read them; those that are None are left out."""
    return " ".join(f"{key}={_shown(value)}" for key, value in values.items() if value is not None)


def _shown(value: object) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    plain = text.isprintable() and text and not set(text) & set(' "=\\')
    return text if plain else json.dumps(text, ensure_ascii=False)
