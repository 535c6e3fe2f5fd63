"""Small files of a table are written together, each time the table's commits pass a multiple of ``COMMITS``.

- The rule needs nothing but the number of commits, so that batches in which it is not due cost nothing.
- It is done right behind the batch's last commit, where that was made: nobody merges into the table meanwhile, and the
  ledger names the version that has the new files.
- The batch is applied before it begins, and it is not tried again with the same batch. So it may fail, or end the
  process: the table keeps its small files until the next multiple, and nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from pg_cdc_source.errors import short_text

log = logging.getLogger(__name__)

# As many files as Delta's own auto compaction waits for; a commit of a batch leaves one or a few.
COMMITS = 50
# About the size of the files that a snapshot's rows come in: those are left alone, also where every merge that touches
# a row of a file writes all of it anew.
SMALL_BYTES = 32 << 20


def is_due(every: int, before: int, now: int) -> bool:
    """Whether the commits of a table, which were ``before`` and are ``now``, have passed a multiple of ``every``."""
    return before // every < now // every


def compact_where_due(name: str, before: int, now: int, compact: Callable[[], None]) -> bool:
    """Compact a table that had ``before`` commits and has ``now``, where that is due; whether it was tried."""
    if not is_due(COMMITS, before, now):
        return False
    try:
        compact()
    except MemoryError:
        raise
    except Exception as error:
        log.warning("small files of %s stay for now: %s", name, short_text(error))
    else:
        log.info("small files of %s were written together", name)
    return True
