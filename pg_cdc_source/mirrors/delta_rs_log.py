"""The log of a table that delta-rs writes: how often a checkpoint sums it up, and when old entries go.

- A batch opens its tables, and whoever opens one reads all commits since its last checkpoint. By default delta-rs makes
  one after 100 commits. A table with 98 took 30 ms of CPU to open; with one after 10, 6 ms, and each commit less, too.
- By default delta-rs looks through the whole log at each checkpoint, for entries that have expired. Where it has 1,300
  of them, that takes almost half as long as all the rest of a small batch; a busy table may make as many in an hour.
- A checkpoint repeats which files were removed, by default in the last week (``deletedFileRetentionDuration``). With a
  batch a second, 600,000 of them make a checkpoint of 50 MB, every ten commits. The files stay all the same; a VACUUM
  that goes by this list alone finds those of the last day.
- Those of a day still make 7 MB, and 8,640 checkpoints a day 62 GB, which Delta would keep for 30 days. Whoever reads
  an old version needs one of them, and the commits behind it. So of the older ones, one in a thousand commits stays.
"""

from __future__ import annotations

import logging
import re
from datetime import datetime, timedelta, timezone

from deltalake import DeltaTable
from pyarrow.fs import FileSelector

from pg_cdc_source.lake.compaction import is_due
from pg_cdc_source.lake.directories import find_directory

log = logging.getLogger(__name__)

LOG_PROPERTIES = {
    "delta.checkpointInterval": "10",
    "delta.enableExpiredLogCleanup": "false",
    "delta.deletedFileRetentionDuration": "interval 1 day",
}
# Nobody reads an older version of a ledger.
LOG_PROPERTIES_OF_LEDGER = LOG_PROPERTIES | {"delta.deletedFileRetentionDuration": "interval 1 hour"}
_COMMITS_PER_CLEANUP = 1_000
# Whoever has just opened the table may read by an older checkpoint.
_IN_USE = timedelta(hours=1)
_OF_LOG = re.compile(r"(\d{20})\.(?:json|(checkpoint)(?:\.\d+\.\d+)?\.parquet)")


def clean_where_due(path: str, before: int, now: int) -> None:
    """Remove entries of the log that have expired, where a table had ``before`` commits and has ``now``."""
    if is_due(_COMMITS_PER_CLEANUP, before, now):
        try:
            DeltaTable(path).cleanup_metadata()
            _remove_superseded(path)
        except Exception as error:
            log.warning("old entries of the log of %s stay for now: %s: %s", path, type(error).__name__, error)


def _remove_superseded(path: str) -> None:
    """Remove checkpoints without which every version that can be read still can be: by an older one, and commits."""
    filesystem, root = find_directory(path)
    commits, checkpoints = set[int](), dict[int, list[tuple[str, datetime]]]()
    for file in filesystem.get_file_info(FileSelector(f"{root}/_delta_log")):
        found = _OF_LOG.fullmatch(file.base_name)
        if found is not None and found[2] is None:
            commits.add(int(found[1]))
        elif found is not None:
            checkpoints.setdefault(int(found[1]), []).append((file.path, file.mtime))
    first = max(commits, default=0)
    while first - 1 in commits:
        first -= 1
    before = datetime.now(timezone.utc) - _IN_USE
    kept: int | None = None
    for version, files in sorted(checkpoints.items())[:-1]:
        is_next = kept is None or kept // _COMMITS_PER_CLEANUP < version // _COMMITS_PER_CLEANUP or kept + 1 < first
        if is_next or any(at >= before for _, at in files):
            kept = version
            continue
        for file_path, _ in files:
            filesystem.delete_file(file_path)
