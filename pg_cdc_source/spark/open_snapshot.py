"""One snapshot that the user's own process holds, for several Spark actions."""

from __future__ import annotations

import contextlib
import functools
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from pg_cdc_source.errors import OptionError
from pg_cdc_source.offsets import Lsn
from pg_cdc_source.options.conninfo import ConnectionOptions
from pg_cdc_source.options.names import QualifiedName
from pg_cdc_source.options.snapshot_options import parse_snapshot_options
from pg_cdc_source.options.texts import option_texts
from pg_cdc_source.postgres.catalog import find_relations
from pg_cdc_source.postgres.connection import FULL_SECONDS, connect
from pg_cdc_source.postgres.locks import check_files
from pg_cdc_source.postgres.slot_creation import drop_slot, give_up_slot
from pg_cdc_source.postgres.snapshots import SnapshotSpec, make_snapshot

_REFUSED = {
    **dict.fromkeys(("dbtable", "query"), "give it to the reads, beside the options of the open snapshot"),
    "snapshot": "remove it: this makes a snapshot; one that exists is read with the option snapshot of the format",
    "snapshotidle": "remove it: the snapshot lasts as long as the block",
}
_NAMES = "pass names of tables, each as one item of a list"


@dataclass(frozen=True, slots=True)
class OpenSnapshot:
    """A snapshot that is held open: pass ``options`` to ``spark.read.format("pgsnapshot").options(**options)``.

    ``lsn`` is the greatest position it contains, None without a consistent point.
    """

    lsn: Lsn | None
    options: dict[str, str] = field(repr=False)


@contextmanager
def open_snapshot(
    url: str | None = None, *, tables: str | Sequence[str] = (), slot: str | None = None, **options: object
) -> Iterator[OpenSnapshot]:
    """Hold one snapshot for several reads, also of several Spark actions, until the block ends.

    ``tables``, a name or a list of them, are locked (ACCESS SHARE) at once, so that no TRUNCATE or rewrite takes their
    rows away from the snapshot. With ``slot`` a durable slot of that name is created at the snapshot's consistent point
    and left for a stream to start from, unless the block is not begun. ``options`` are the connection options of the
    format, ``consistentPoint`` and ``slotTimeout``, and what all of the reads have in common. The snapshot is held by
    one session of this process.
    """
    given = option_texts({"url": url, "slot": slot or None, **options})
    for name in given:
        if name.lower() in _REFUSED:
            raise OptionError(f"the option {name} is not known here", remedy=_REFUSED[name.lower()])
    # The parser asks for dbtable or query; this table is never looked for.
    parsed = parse_snapshot_options({**given, "dbtable": "t"})
    spec = SnapshotSpec(parsed.consistent_point, parsed.slot, parsed.slot_timeout_seconds)
    named = [tables] if isinstance(tables, str) else tables
    names = [QualifiedName.parse(table, for_query=_NAMES, for_several=_NAMES) for table in named]
    with contextlib.closing(connect(parsed.connection, "pgsnapshot:open", full_seconds=FULL_SECONDS)) as session:
        relations = find_relations(session, names)
    token = secrets.token_hex(8)
    held = make_snapshot(
        parsed.connection,
        spec,
        lambda snapshot_id: f"pgsnapshot:{token}:open:{snapshot_id}",
        full_seconds=FULL_SECONDS,
    )
    try:
        try:
            held.lock([relation.oid for relation in relations], within_seconds=60)
            for holder, _ in held.holders:
                check_files(holder, "opening a snapshot")
        except BaseException:
            if parsed.slot is not None:
                give_up_slot(parsed.slot, functools.partial(_drop_slot, parsed.connection, parsed.slot))
            raise
        passed_on = {k: v for k, v in given.items() if k.lower() not in ("slot", "consistentpoint", "slottimeout")}
        yield OpenSnapshot(held.lsn, {**passed_on, "snapshot": held.first.snapshot_id})
    finally:
        held.close()


def _drop_slot(options: ConnectionOptions, slot: str) -> None:
    with contextlib.closing(connect(options, "pgsnapshot:open", full_seconds=FULL_SECONDS)) as session:
        drop_slot(session, slot)
