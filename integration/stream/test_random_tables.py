"""Tables come, go and change at random under load, and the stream's process is killed at random: the rows are right.

What the stream has given is judged by the tables at the end, and change by change by a second slot. SEEDS="3 4" runs
others than those here.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import second_slot
from driving import SLOT, Row, drop_slots, run
from dying_source import REFUSED, Files, SourceProcesses
from layout_mirror import Mirror
from psycopg2.extensions import connection as Session
from random_tables import RandomTables
from replica import upserted
from second_opinion import SecondOpinion
from watch import session_names, slots, wait_until

from pg_cdc_source.offsets import StreamOffset

SEEDS = [int(seed) for seed in os.environ.get("SEEDS", "1").split()]
SECONDS = 7.0

# When a process is killed: at any moment; while a temporary slot is made, or the snapshot of a join is held; while rows
# of tables are read; while those are turned back.
AIMS = ("any", "any", "any", "slot", "held", "reading", "rewind")


@pytest.fixture(scope="module")
def all_processes() -> Iterator[SourceProcesses]:
    started = SourceProcesses()
    yield started
    started.close()


@pytest.fixture
def processes(all_processes: SourceProcesses, pg: Session) -> Iterator[SourceProcesses]:
    yield all_processes
    all_processes.end()
    drop_slots(pg)


def changes(rows: Iterable[Row]) -> Counter[tuple[tuple[str, str], ...]]:
    """Rows as they can be compared. Those of a table that was read again may be in the state of a later change."""
    return Counter(
        tuple((name, str(value)) for name, value in row.items()) for row in rows if row["_change_type"] != "snapshot"
    )


class Dying:
    """A query whose process is killed, and started again at once; an operator does what its errors say."""

    def __init__(
        self,
        processes: SourceProcesses,
        pg: Session,
        tables: RandomTables,
        directory: Path,
        options: dict[str, str],
        seed: int,
    ) -> None:
        self.kills: Counter[str] = Counter()
        self.refusals: list[str] = []
        self.begun_anew: list[str] = []
        self.all_files: list[Files] = []
        self._processes = processes
        self._pg = pg
        self._tables = tables
        self._directory = directory
        self._options = options
        self._random = random.Random(f"{seed} kill")
        self._refused_since: float | None = None
        self._begin()

    def _begin(self) -> None:
        self.files = Files(self._directory / str(len(self.begun_anew)))
        self.all_files.append(self.files)
        self.batches: list[list[Row]] = []

    def live_and_die(self, aim: str) -> None:
        """Run a process until a moment comes, and kill it."""
        self._start()
        at_most = time.monotonic() + (self._random.uniform(0.1, 2.0) if aim == "any" else 3.0)
        moment = at_most
        while (status := self._processes.status(0.005)) is None:
            if moment == at_most and aim in self._doing():
                moment = min(at_most, time.monotonic() + self._random.choice((0.0, 0.01, 0.05)))
            if time.monotonic() >= moment:
                doing = self._doing()
                status = self._processes.kill()
                if status != REFUSED:
                    self.kills[
                        next((what for what in ("rewind", "reading", "slot", "held") if what in doing), "any")
                    ] += 1
                    return
                break
        self._obey(status)

    def live_until(self, look: Callable[[], object], seconds: float) -> None:
        """Run processes until something is to be seen; then the last one is killed."""
        self._start()

        def seen() -> bool:
            if (status := self._processes.status()) is not None:
                self._obey(status)
                self._start()
            self.read()
            return bool(look())

        wait_until(seen, seconds)
        self._processes.end()

    def read_tables(self) -> None:
        """Run until the initial snapshot is over. A table that goes before it was read would be an error."""
        self.live_until(lambda: self.batches and not self.offset.is_reading, 60)

    @property
    def offset(self) -> StreamOffset:
        """Where the last batch that is over ends."""
        found = StreamOffset.from_json(self.files.offset(len(self.batches) - 1))
        assert found is not None
        return found

    def read(self) -> None:
        """Take what the sink has got. A batch that came again has the changes that it had before."""
        while self.files.is_committed(number := len(self.batches)):
            self.batches.append(self.files.rows(number))
            for before in self.files.rows_before(number):
                lost, new = changes(before) - changes(self.batches[-1]), changes(self.batches[-1]) - changes(before)
                assert not lost and not new, f"batch {number} came again without {lost} and with {new}"  # noqa: PT018
            self._refused_since = None

    def _start(self) -> None:
        self._began_in = self.files.newest if self._is_reading_rows() else None
        self._processes.start(self._options, self.files.directory)

    def _is_reading_rows(self) -> bool:
        return self.files.is_under_way and "snapshot" in self.files.offset(self.files.newest)

    def _doing(self) -> set[str]:
        """What the process does, as far as it is to be seen."""
        ((is_made, is_held),) = run(
            self._pg,
            "SELECT EXISTS (SELECT FROM pg_replication_slots WHERE temporary AND database = current_database()),"
            f" EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database()"
            f" AND application_name = 'pgcdc:{SLOT}:snapshot')",
        )
        is_reading = self._is_reading_rows()
        is_rewinding = is_reading and self._began_in == self.files.newest and (is_made or is_held)
        said = {"slot": is_made, "held": is_held and not is_made, "reading": is_reading, "rewind": is_rewinding}
        return {what for what, is_so in said.items() if is_so}

    def _obey(self, status: int) -> None:
        """Do what an error says."""
        assert status == REFUSED, (self.files.directory / "log").read_text()[-5000:]
        self.read()
        text = (self.files.directory / "refused").read_text()
        self.refusals.append(text)
        self._refused_since = self._refused_since or time.monotonic()
        assert time.monotonic() < self._refused_since + 30, f"for 30 s: {text}"
        # The one that offers both is of a server that cannot decode what was written without the publication.
        if "start over" in text and ("same checkpoint" not in text or "onSlotLost" in text):
            self._begin_anew(text)

    def _begin_anew(self, text: str) -> None:
        with self._tables.altering:
            print("begins anew:", text)
            self.begun_anew.append(text)
            wait_until(
                lambda: run(self._pg, f"SELECT FROM pg_replication_slots WHERE slot_name = '{SLOT}' AND active") == []
            )
            run(self._pg, f"SELECT pg_drop_replication_slot('{SLOT}')")
            self._begin()
            self.read_tables()


def published(pg: Session) -> list[str]:
    return [name for (name,) in run(pg, "SELECT tablename FROM pg_publication_tables WHERE pubname = 's'")]


@pytest.mark.parametrize("on_schema_change", ["ignore", "emit"])
@pytest.mark.parametrize("seed", SEEDS)
def test_tables_that_come_and_go_end_right(
    seed: int, on_schema_change: str, pg: Session, db: str, tmp_path: Path, processes: SourceProcesses
) -> None:
    rng = random.Random(f"{seed} {on_schema_change}")
    columns = on_schema_change == "emit"
    tables = RandomTables(db, seed, listed=rng.random() < 0.5, columns=columns, server_version=pg.server_version)
    second_slot.begin(pg)
    tables.create()
    limit = rng.choice(("3", "20", "100000"))
    options = {"url": db, "slot": SLOT, "tables": "public.*", "onSchemaChange": on_schema_change}
    stream = Dying(processes, pg, tables, tmp_path, {**options, "maxRowsPerBatch": limit}, seed)
    tables.altering.acquire()
    with tables.changing() as failures:
        try:
            for _ in range(rng.randrange(4)):
                stream.live_and_die(rng.choice(AIMS))
            stream.read_tables()
        finally:
            tables.altering.release()
        until = time.monotonic() + SECONDS
        while time.monotonic() < until and not failures:
            stream.live_and_die(rng.choice(AIMS))
    renamed = sorted(tables.renamed)
    try:
        stream.live_until(lambda: not wrong(pg, stream, columns, renamed), 60)
        # A table that took another's name: its rows are there under the old one until somebody asks.
        for name in renamed:
            run(pg, f"""SELECT pg_logical_emit_message(true, 'pgcdc', '{{"snapshot": ["public.{name}"]}}')""")
        stream.live_until(lambda: not wrong(pg, stream, columns), 60)
    finally:
        kinds = Counter(what.rsplit(" ", 2)[0] for what in tables.done)
        print(f"seed {seed} {on_schema_change}, limit {limit}; {kinds}")
        print(f"killed {stream.kills}, refused {Counter(text.splitlines()[0] for text in stream.refusals)}")
        print(f"wrong at the end: {wrong(pg, stream, columns)}")
    expect_nothing_left(pg, processes)
    told = second_slot.end(pg)
    (tmp_path / "told").write_text("".join(f"{one.oid} {one.table} {one.change}\n" for one in told))
    opinion = SecondOpinion(told, tables.gaps)
    differences = [one for files in stream.all_files for one in opinion.differences(files)]
    print("\n".join([*differences[:20], *(tables.done if differences else [])]))
    assert not differences
    print(f"{len(stream.batches)} batches, {opinion.joins} joins, {opinion.compared} changes compared")
    # Nothing else loses what a slot had.
    assert all("publication" in text for text in stream.begun_anew), stream.begun_anew
    assert len(stream.begun_anew) <= sum(what.startswith("publication ") for what in tables.done)


def expect_nothing_left(pg: Session, processes: SourceProcesses) -> None:
    """Within 10 s: no slot but the two, which nobody reads, no session, and no process."""

    def left() -> list[str]:
        active = run(
            pg, "SELECT slot_name::text FROM pg_replication_slots WHERE database = current_database() AND active"
        )
        others = set(slots(pg)) ^ {SLOT, second_slot.NAME}
        return [*(name for (name,) in active), *others, *session_names(pg, "pgcdc:%"), *processes.running()]

    try:
        wait_until(lambda: not left(), 10)
    except AssertionError:
        raise AssertionError(f"left: {left()}") from None


def wrong(pg: Session, stream: Dying, columns: bool, but: Iterable[str] = ()) -> dict[str, str]:
    """What a sink that takes batch after batch, and one that sorts all rows, have otherwise than the source."""
    stream.read()
    found = {}
    batches = [[row for row in batch if row["_change_type"] != "schema"] for batch in stream.batches]
    both = upserted(batches), upserted([[row for batch in batches for row in batch]])
    mirrors = mirrored(stream.batches) if columns else {}
    for name in published(pg):
        if name in but:
            continue
        there = dict(run(pg, f"SELECT id, v FROM {name}"))
        for way, sink in zip(("by batch", "sorted"), both, strict=True):
            if sink.get(f"public.{name}", {}) != there:
                has = sink.get(f"public.{name}", {})
                lacks = {key: value for key, value in there.items() if has.get(key) != value}
                surplus = {key: value for key, value in has.items() if key not in there}
                found[name] = f"{way} lacks {lacks} and has {surplus}"
        if columns and (other := other_columns(pg, name, mirrors.get(f"public.{name}", Mirror()))):
            found[name] = other
    return found


def mirrored(batches: Iterable[Iterable[Row]]) -> dict[str, Mirror]:
    """Each table with all its columns, from the stream alone."""
    mirrors: dict[str, Mirror] = {}
    for batch in batches:
        for row in sorted(batch, key=lambda row: (row["_commit_lsn"], row["_seq"], row["_change_type"] != "schema")):
            mirrors.setdefault(row["_table"], Mirror()).apply(row)
    return mirrors


def other_columns(pg: Session, name: str, mirror: Mirror) -> str:
    """In which values a mirror differs from its table. Columns that changed after the last row are not said yet."""
    numbers: dict[str, int] = dict(
        run(
            pg,
            "SELECT attname, attnum FROM pg_attribute"
            f" WHERE attrelid = '{name}'::regclass AND attnum > 0 AND NOT attisdropped",
        )
    )
    if mirror.stale:
        return f"rows {mirror.stale} are still to come again"
    for row in (found for (found,) in run(pg, f"SELECT to_jsonb(t) FROM {name} AS t")):
        there: dict[int, Any] = {numbers[column]: value for column, value in row.items()}
        has = mirror.rows.get(row["id"], {})
        if any(str(there[number]) != str(value) for number, value in has.items() if number in there):
            return f"row {row['id']} is {has} and should be {there}"
    return ""
