"""The log of a table that delta-rs writes: how often a checkpoint sums it up, and when old entries go.

- A batch opens its tables, and whoever opens one reads all commits since its last checkpoint. By default delta-rs makes
  one after 100 commits. A table with 98 took 30 ms of CPU to open; with one after 10, 6 ms, and each commit less, too.
- By default delta-rs looks through the whole log at each checkpoint, for entries that have expired. Where it has 1,300
  of them, that takes almost half as long as all the rest of a small batch; a busy table may make as many in an hour.
- A checkpoint repeats which files were removed, by default in the last week (``deletedFileRetentionDuration``). With a
  batch a second, 600,000 of them make a checkpoint of 50 MB, every ten commits. The files stay all the same; a VACUUM
  that goes by this list alone finds those of the last day.
"""

from __future__ import annotations

import logging

from deltalake import DeltaTable

from pg_cdc_source.lake.compaction import is_due

log = logging.getLogger(__name__)

LOG_PROPERTIES = {
    "delta.checkpointInterval": "10",
    "delta.enableExpiredLogCleanup": "false",
    "delta.deletedFileRetentionDuration": "interval 1 day",
}
# Nobody reads an older version of a ledger.
LOG_PROPERTIES_OF_LEDGER = LOG_PROPERTIES | {"delta.deletedFileRetentionDuration": "interval 1 hour"}
_COMMITS_PER_CLEANUP = 1_000


def clean_where_due(path: str, before: int, now: int) -> None:
    """Remove entries of the log that have expired, where a table had ``before`` commits and has ``now``."""
    if is_due(_COMMITS_PER_CLEANUP, before, now):
        try:
            DeltaTable(path).cleanup_metadata()
        except Exception as error:
            log.warning("old entries of the log of %s stay for now: %s: %s", path, type(error).__name__, error)
