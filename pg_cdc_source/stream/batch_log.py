"""What a stream says of itself: a line for each batch in the log, and what Spark shows as its latest offset.

Tables, LSNs, counts and durations; never a value of a row.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from pg_cdc_source.logs import fields
from pg_cdc_source.offsets import ALL, Lsn, Position, StreamOffset
from pg_cdc_source.options.stream_options import StreamOptions
from pg_cdc_source.protocol.ipc import from_ipc
from pg_cdc_source.stream.batch_reading import Batch
from pg_cdc_source.stream.lag import Lag

log = logging.getLogger(__name__)

MOST_NAMED = 20


def log_batch(
    options: StreamOptions,
    start: StreamOffset | None,
    end: StreamOffset,
    batch: Batch,
    seconds: float,
    standing_at: Callable[[StreamOffset], Lag | None],
) -> None:
    """Log a batch that is handed to Spark, which took ``seconds`` to put together."""
    if not log.isEnabledFor(logging.INFO):
        return
    standing = standing_at(end)
    waiting = None if standing is None else standing.waiting
    log.info(
        "batch %s",
        fields(
            slot=options.slot,
            start=None if start is None else _lsn(start.position),
            end=_lsn(end.position),
            snapshot=_counted(Counter(part.table.name for part in batch.parts)),
            tables=_counted(_rows(options, batch)),
            rows=sum(chunk.rows for chunk in batch.chunks),
            bytes=sum(chunk.raw_bytes for chunk in batch.chunks),
            seconds=seconds,
            buffered_rows=waiting and waiting.rows,
            buffered_bytes=waiting and waiting.bytes,
            spilled_bytes=waiting and waiting.file_bytes,
            end_of_wal=standing and standing.end_of_wal,
            lag_bytes=standing and standing.lag_bytes,
            lag_seconds=standing and standing.lag_seconds,
        ),
    )


def described(options: StreamOptions, standing: Lag) -> dict[str, Any]:
    """What the stream reads, and how far behind its server it is, as Spark's progress shows it.

    ``lsn`` is comparable with that of the batch's end offset.
    """
    return {
        "tables": str(options.dbtable or ",".join(map(str, options.tables))),
        "slot": options.slot,
        "lsn": str(Position.before(standing.end_of_wal).lsn),
        "lagBytes": standing.lag_bytes,
        "lagSeconds": round(standing.lag_seconds, 3),
        "bufferedRows": standing.waiting.rows,
        "bufferedBytes": standing.waiting.bytes,
        "spilledBytes": standing.waiting.file_bytes,
    }


def _lsn(position: Position) -> str:
    return str(position.lsn) if position.seq == ALL else f"{position.lsn}:{Lsn(position.seq)}"


def _rows(options: StreamOptions, batch: Batch) -> Counter[str]:
    """How many rows there are of each table."""
    rows: Counter[str] = Counter()
    for chunk in batch.chunks:
        if options.dbtable is not None:
            rows[str(options.dbtable)] += chunk.rows
            continue
        for count in from_ipc(chunk.data()).column("_table").value_counts().to_pylist():
            rows[count["values"]] += count["counts"]
    return rows


def _counted(counts: Counter[str]) -> str | None:
    """``public.a:12,public.b:3``, the greatest first; None where there are none."""
    named: Iterable[str] = [f"{name}:{count}" for name, count in counts.most_common(MOST_NAMED)]
    more = len(counts) - MOST_NAMED
    return ",".join([*named, *([f"and {more} more"] if more > 0 else [])]) or None
