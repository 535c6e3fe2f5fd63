"""Turn a later snapshot back to the point as of which rows belong to a batch.

An initial snapshot lives in a session of the source process. When that session is gone, its point t1 cannot be read any
more. Nor can the end of a batch that was given before anything of it was read, where tables join there. To read the
tables at a new point t2 as they are would be simpler, and a replayed batch would have other rows than the first time,
which a sink that is idempotent by batch does not expect. But the slot still has every change between t1 and t2, and
under REPLICA IDENTITY FULL each of them says what the row was before. So the rows of t1 can be had exactly
(``rewound``)::

         slot ──► t1 ───── changes of the tables, with the rows before them ─────► t2
                  rows at t1 ◄──────────── turned back ──────────── rows at t2 ◄── read by Spark's tasks

- The slot is only read: nothing is confirmed but what Spark has committed, and the stream gets the same changes again.
- A table that only grew needs no old images, so whatever its identity, it is turned back all the same.
- Where a table was truncated, or its rows were changed under less than FULL, old images are missing. Then the rows of
  t2 are taken as they are. The stream repeats the changes since t1 on top of them, so an upsert by key still ends where
  the source is; but not for a key that was changed with a value that did not travel (TOAST), which is in neither. The
  log says which tables that happens to.
- What a publication leaves out (``keyless=insertOnly``, ``publish = 'insert'``) is not in the slot. Such a table is
  turned back by what it sends, and the log says so.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace

import pyarrow as pa

from pg_cdc_source.errors import PgCdcError
from pg_cdc_source.offsets import Lsn, Position
from pg_cdc_source.options.names import listed
from pg_cdc_source.postgres.replication import ReplicationStream
from pg_cdc_source.protocol.changes import ChangeDecoder, Described, relations_in
from pg_cdc_source.protocol.layout import Layout, StreamedTable, typed_schema
from pg_cdc_source.protocol.streamed import StreamedTransaction
from pg_cdc_source.protocol.transactions import Changes, TransactionAssembler
from pg_cdc_source.protocol.walsender import Keepalive
from pg_cdc_source.stream.first_rows.changed_rows import AmbiguousKeyError, ChangedRows
from pg_cdc_source.stream.first_rows.rewound import Rewound, turn_back
from pg_cdc_source.stream.received.buffer import Match, Matched
from pg_cdc_source.stream.received.slot_reader import longest_silence, silent_error
from pg_cdc_source.stream.received.spill import Spill

log = logging.getLogger(__name__)

# Of rows that were changed, in the driver's memory: a process that is killed for it would never be done.
_MOST_BYTES = 4 << 30
_BYTES_PER_FOLD = 256 << 20


@dataclass(frozen=True, slots=True)
class Stretch:
    """What of the slot is read: from the point ``origin`` through ``snapshot_lsn``, which the snapshot contains.

    Nothing beyond ``confirmed`` is confirmed.
    """

    origin: Lsn
    snapshot_lsn: Lsn
    confirmed: Lsn


def rewind(
    connect: Callable[[Position], ReplicationStream],
    layout: Layout,
    schema: pa.Schema,
    tables: Sequence[StreamedTable],
    keyed: Collection[int],
    left_out: Mapping[int, Sequence[str]],
    match: Match,
    stretch: Stretch,
    require_driver: Callable[[], None],
) -> dict[int, Rewound]:
    """Find out how to turn tables back from the end of ``stretch`` to its begin.

    ``keyed`` are the oids of tables that have had no two rows of one key since then, and ``left_out`` has the kinds of
    changes that are not sent of a table. ``require_driver`` raises where nobody waits for it any more. Tables that are
    missing in the result are taken as they are, and so logged.
    """
    if not tables:
        return {}
    keys = {table.oid: table.key for table in tables if table.oid in keyed}
    while True:
        try:
            found = _read(connect, tables, keys, match, layout, stretch, require_driver)
            break
        except AmbiguousKeyError as error:
            keys.pop(error.oid)
    origin, snapshot_lsn = stretch.origin, stretch.snapshot_lsn
    rewound = {}
    for table in tables:
        changed = found[table.oid]
        if changed.missing is not None:
            log.warning(
                "rows of %s are read as of %s, because a snapshot of %s is not there any more: %s; they may come in "
                "the state of a later change, %s",
                table.name,
                snapshot_lsn,
                Lsn(origin - 1),
                changed.missing,
                "which an upsert by key mends, but for large values of a row whose key was changed meanwhile"
                if table.key or table.identity in "di"
                else "some of them twice",
            )
            continue
        lacking = left_out.get(table.oid, ())
        if lacking:
            log.info(
                "rows of %s are read as of %s and turned back to %s, but not what %s did to them in between, which the "
                "publication leaves out",
                table.name,
                snapshot_lsn,
                origin,
                listed(lacking),
            )
        else:
            log.info("rows of %s are read as of %s and turned back to %s exactly", table.name, snapshot_lsn, origin)
        back = turn_back(table, changed, layout, schema, Lsn(origin - 1))
        rewound[table.oid] = replace(back, is_exact=not lacking)
    return rewound


def _read(
    connect: Callable[[Position], ReplicationStream],
    tables: Sequence[StreamedTable],
    keys: Mapping[int, Sequence[str]],
    match: Match,
    layout: Layout,
    stretch: Stretch,
    require_driver: Callable[[], None],
) -> dict[int, ChangedRows]:
    """The changes of ``tables`` within ``stretch``."""
    confirmed = stretch.confirmed
    with_images = Layout(envelope=False, before_image=True, unrepresentable=layout.unrepresentable, on_truncate="emit")
    decoders = {table.oid: ChangeDecoder(with_images, _numbered_schema(table)) for table in tables}
    changed = {table.oid: ChangedRows(table, keys.get(table.oid, ())) for table in tables}
    for table in tables:
        if not table.codecs:
            changed[table.oid].end("it has no columns to tell rows by")
    matched = Matched(match)
    assembler = TransactionAssembler(
        Position.before(stretch.origin), lambda: StreamedTransaction(Spill), renewed_before=sys.maxsize
    )

    room = _BYTES_PER_FOLD

    def keep(changes: Changes) -> bool:
        """Keep what is new, and return whether that is too much."""
        nonlocal room
        last_seq = 0
        there = relations_in(changes.messages)
        # Each looks at all of the chunk. One does so in any case: it says the last number.
        wanted = [oid for oid in decoders if oid in there and changed[oid].missing is None] or [tables[0].oid]
        for oid in wanted:

            def of_one(other: int, position: Position, oid: int = oid) -> Described | None:
                if other != oid or changed[oid].missing is not None:
                    return None
                described = matched.of(changes, other, position)
                if described is None:
                    changed[oid].end("its columns were changed in between")
                return described

            batch, last_seq = decoders[oid].decode(changes.messages, changes.runs, of_one, changes.after)
            if batch.num_rows:
                changed[oid].add(batch, changes.relation(oid).relation.identity)
                room -= batch.nbytes
        assembler.kept(changes, last_seq)
        return room < 0

    with closing(connect(Position.before(stretch.origin))) as stream:
        for changes in _changes(stream, assembler, stretch.snapshot_lsn, confirmed, require_driver):
            if keep(changes):
                with _answering(stream, confirmed):
                    # Each time, all that is kept is looked through.
                    room = max(_BYTES_PER_FOLD, _fold(changed.values()) // 4)
    _fold(changed.values())
    return changed


@contextmanager
def _answering(stream: ReplicationStream, confirmed: Lsn) -> Iterator[None]:
    """Tell the server from a thread that somebody is there; the stream has no other user meanwhile.

    It ends a session of which it hears nothing for ``wal_sender_timeout``.
    """
    done = threading.Event()

    def answer() -> None:
        # A session that is lost is found out by the next question.
        with contextlib.suppress(PgCdcError):
            while not done.wait(1.0):
                stream.confirm(confirmed, ask=False)

    thread = threading.Thread(target=answer, name="pgcdc-rewind", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _fold(changed: Collection[ChangedRows]) -> int:
    """Fold all of them, and give up the largest where they have not room enough. Return how many bytes they take."""
    for rows in changed:
        rows.fold()
    while (taken := sum(rows.nbytes for rows in changed)) > _MOST_BYTES:
        largest = max(changed, key=lambda rows: rows.nbytes)
        largest.end(f"the rows that were changed in between take {largest.nbytes >> 20} MB of the driver's memory")
    return taken


def _numbered_schema(table: StreamedTable) -> pa.Schema:
    """The schema of typed rows by numbers: a table of the envelope may have columns named like the change columns."""
    codecs = [replace(codec, column=replace(codec.column, name=str(i))) for i, codec in enumerate(table.codecs)]
    return typed_schema(table.name, codecs, before_image=True)


def _changes(
    stream: ReplicationStream,
    assembler: TransactionAssembler,
    through: Lsn,
    confirmed: Lsn,
    require_driver: Callable[[], None],
) -> Iterator[Changes]:
    """Receive until everything up to ``through`` has come, and nothing beyond it."""
    wake, waker = socket.socketpair()
    longest = longest_silence(stream)
    with closing(wake), closing(waker):
        ask_at, heard = 0.0, time.monotonic()
        while assembler.complete < Position(through) and (assembler.commit_lsn or 0) <= through:
            if time.monotonic() >= ask_at:
                require_driver()
                stream.confirm(confirmed, ask=True)
                ask_at = time.monotonic() + 1.0
            rows = assembler.rows
            waiting = len(rows or ())
            data = stream.receive(rows)
            is_full = rows is not None and rows.is_full
            if is_full or data is not None or len(rows or ()) > waiting:
                heard = time.monotonic()
            if is_full:
                yield from _given(assembler.make_room())
                heard = time.monotonic()  # what was given is folded now and then, which takes a while
            elif data is None and len(rows or ()) == waiting:
                if time.monotonic() > heard + longest:
                    raise silent_error(longest)
                if stream.wait(wake, 1.0):
                    heard = time.monotonic()
            if data is not None:
                yield from _given(assembler.receive(data))
            while assembler.is_replaying:
                yield from _given(assembler.replay())
        yield from _given(assembler.take())


def _given(event: Changes | Keepalive | None) -> Iterator[Changes]:
    if isinstance(event, Changes):
        yield event
