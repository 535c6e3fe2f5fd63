"""A question about mirrors: the time to bring a backlog of changes of several tables into a lake."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from pyspark.sql import DataFrame

from pg_cdc_source import mirror
from pg_cdc_source.bench.lab import Lab
from pg_cdc_source.bench.question import Contender, Question, Sample, Target
from pg_cdc_source.lake.sink import Applied
from pg_cdc_source.postgres.backoff import Backoff
from pg_cdc_source.postgres.slot_creation import drop_slot

TYPED, ENVELOPE, DELTALAKE = "one table, typed", "five tables, envelope=arrow", "five tables, deltalake"

_TABLES = tuple(f"mirrored_{i}" for i in range(1, 6))
_ONE = "mirrored_alone"
_SLOT = "bench_mirror"
_PUBLICATIONS = {"bench_five": _TABLES, "bench_alone": (_ONE,)}
_CHANGES_PER_TRANSACTION = 50
_DROP_SECONDS = 60.0

_COLUMNS = "id bigint PRIMARY KEY, customer bigint, quantity int, price numeric(12, 2), note text, changed timestamptz"
_VALUES = "i, i::bigint * 7919 % 100000, i % 100, i % 10000 / 100.0, 'note ' || md5(i::text), now()"


def backlog(lab: Lab) -> Question:
    """70 % updates, 20 % inserts, 10 % deletes of random rows, in transactions of 50."""
    rows, changes = max(1_000, lab.scale.rows // 20), lab.scale.changes
    changes -= changes % (len(_TABLES) * _CHANGES_PER_TRANSACTION)
    _make_tables(lab, rows)
    # The slot is the mirror's: its tables are in the lake before they change.
    loaded = lab.scratch()
    _mirror(lab, loaded)
    lab.execute("SELECT pg_copy_logical_replication_slot(%s, %s)", (_SLOT, f"{_SLOT}_base"))
    for table in _TABLES:
        _change(lab, table, rows, changes // len(_TABLES))
    _change(lab, _ONE, rows, changes)

    def contender(name: str, run: Callable[[], int]) -> Contender:
        return Contender(name, partial(_with_backlog, lab, run))

    return Question(
        "mirror-backlog",
        f"{changes:,} changes of five tables of {rows:,} rows that wait in a slot",
        [
            contender(TYPED, partial(_counted, lab, {"publication": "bench_alone", "dbtable": _ONE}, "count(1)")),
            contender(
                ENVELOPE,
                partial(
                    _counted,
                    lab,
                    {"publication": "bench_five", "tables": ",".join(_TABLES), "envelope": "arrow"},
                    "sum(CASE WHEN _change_type = 'changes' THEN rows END)",
                ),
            ),
            contender(DELTALAKE, partial(_mirrored, lab, loaded, changes)),
        ],
        ("rows_per_s", "wall_s", "client_cpu_s", "server_cpu_s"),
        [Target("rows_per_s", ENVELOPE, "at least", 0.9, to=TYPED)],
        most_rounds=3,
        notes=f"Transactions of {_CHANGES_PER_TRANSACTION} changes: 70 % updates, 20 % inserts, 10 % deletes of random"
        " rows. The one table has as many changes as the five, in the same WAL, which all contenders read. The first"
        " two count the changes of each batch; the third is mirror() with its ledger.",
    )


def _make_tables(lab: Lab, rows: int) -> None:
    for table in (*_TABLES, _ONE):
        lab.execute(
            f"DROP TABLE IF EXISTS {table}; CREATE TABLE {table} ({_COLUMNS});"
            f" INSERT INTO {table} SELECT {_VALUES} FROM generate_series(1, {rows}) AS i"
        )
    for publication, tables in _PUBLICATIONS.items():
        lab.execute(
            f"DROP PUBLICATION IF EXISTS {publication}; CREATE PUBLICATION {publication} FOR TABLE {', '.join(tables)}"
            " WITH (publish_via_partition_root = true)"
        )


def _change(lab: Lab, table: str, rows: int, changes: int) -> None:
    lab.execute(f"""
        DO $$ BEGIN
            FOR n IN 0 .. {changes // _CHANGES_PER_TRANSACTION - 1} LOOP
                UPDATE {table} SET quantity = quantity + 1, changed = now()
                WHERE id IN (SELECT (n * 35 + k)::bigint * 7919 % {rows} + 1 FROM generate_series(1, 35) AS k);
                INSERT INTO {table} SELECT {_VALUES}
                FROM generate_series({rows} + n * 10 + 1, {rows} + n * 10 + 10) AS i;
                DELETE FROM {table} WHERE id BETWEEN {rows} + n * 10 + 1 AND {rows} + n * 10 + 5;
                COMMIT;
            END LOOP;
        END $$
    """)


def _with_backlog(lab: Lab, run: Callable[[], int]) -> Sample:
    """Run with a copy of the slot, so that what one contender confirms does not move the slot of the next."""
    _drop(lab)
    lab.execute("SELECT pg_copy_logical_replication_slot(%s, %s)", (f"{_SLOT}_base", _SLOT))
    return lab.meter.measure(run)


def _drop(lab: Lab) -> None:
    # For a moment the server has not noticed yet that the reader is gone.
    backoff = Backoff(0.05, longest_seconds=1, within_seconds=_DROP_SECONDS)
    backoff.retrying(lambda: drop_slot(lab.admin, _SLOT))


def _counted(lab: Lab, options: dict[str, str], count: str) -> int:
    came = 0

    def take(batch: DataFrame, batch_id: int) -> None:
        nonlocal came
        (found,) = batch.selectExpr(count).collect()
        came += found[0] or 0

    reader = lab.spark.readStream.format("pgcdc").options(url=lab.url, slot=_SLOT, startFrom="slot", **options)
    writer = reader.load().writeStream.foreachBatch(take).trigger(availableNow=True)
    writer.option("checkpointLocation", str(lab.scratch())).start().awaitTermination()
    return came


def _mirrored(lab: Lab, loaded: Path, changes: int) -> int:
    """Bring the backlog into a copy of the lake that was loaded before it."""
    copy = lab.scratch()
    shutil.copytree(loaded, copy)
    came = _mirror(lab, copy)
    if came != changes:
        raise RuntimeError(f"the mirror took {came:,} changes of {changes:,}")
    return came


def _mirror(lab: Lab, directory: Path) -> int:
    came = 0

    def count(applied: Applied) -> None:
        nonlocal came
        came += sum(applied.rows.values())

    mirror(
        lab.spark,
        url=lab.url,
        tables=",".join(_TABLES),
        slot=_SLOT,
        target=f"{directory}/lake/{{table}}",
        checkpoint=f"{directory}/checkpoint",
        once=True,
        on_batch=count,
        publication="bench_five",
    ).awaitTermination()
    return came
