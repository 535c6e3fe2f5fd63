"""Lakes of every format whose batches a test runs one after another, without a query."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import lake_jars
import pytest
from driving import Driver, driving, run
from lake import Begin, CatalogLake, DeltaRsLake, Drive, Lake, is_same
from psycopg2.extensions import connection as Session
from sessions import SparkSessions
from watch import wait_until

from pg_cdc_source.lake.first_files import FIRST_FILES, FirstFiles
from pg_cdc_source.lake.shape import Shapes
from pg_cdc_source.stream.tables import looks

LakeOf = Callable[[Drive, Shapes], Lake]

# Both of Spark's formats run the same code in these: what differs has tests of its own (test_spark_tables.py,
# test_delta_steps.py). Delta's merges take three times as long as Iceberg's. delta-rs has no code for a Spark, so a run
# on one that has both formats repeats that on the newest one, which has none.
_FILES = ("test_altered.py", "test_batches.py", "test_modes.py")
_REPEATED = ("delta",) if lake_jars.lacking("iceberg") else ("delta", "deltalake")


# Cases whose code another case of the same test, or the other format, runs as well: by test, their ids.
_REPEATED_CASES = {
    # Each kind of statement has a crash behind it in "all" of either format, and a type's in Iceberg's "a type".
    "test_columns_go_on_changing_where_a_crash_has_ended_it": (
        *("delta-without a drop", "delta-a type", "delta-drops"),
        *("iceberg-without a drop", "iceberg-drops"),
    ),
    # What happens to the table is decided before any format comes into it.
    "test_a_table_that_fails_again_and_again_is_set_aside_and_all_of_them_end_the_query": ("delta",),
    "test_a_table_that_fails_alone_in_its_batch_does_not_end_the_query": ("delta",),
    "test_values_that_were_fetched_in_vain_are_fetched_again": ("delta",),
    "test_a_table_that_does_not_say_its_columns_any_more_is_set_aside": ("delta",),
    # Neither setting is looked for by format.
    "test_a_session_in_which_the_ledgers_rows_would_be_lost_is_refused": (
        *("delta-spark.wap.id", "iceberg-spark.databricks.delta.write.txnAppId"),
    ),
    # "rewritten" does the same, and more behind it.
    "test_a_column_that_somebody_else_put_in_the_place_of_another_is_noticed": ("iceberg-dropped",),
    # What counts as altered is decided by columns alone (tests/mirrors/test_column_changes.py).
    "test_a_table_whose_columns_somebody_else_has_altered_is_made_anew_for_rows_that_come_again": (
        *("delta-DROP COLUMN v-additive", "delta-DROP COLUMN v-evolve", "delta-RENAME COLUMN v TO x-evolve"),
        *("iceberg-DROP COLUMN v-evolve", "iceberg-RENAME COLUMN v TO x-evolve"),
        *("delta-another type-evolve", "iceberg-another type-additive"),
    ),
    # Of a mode's two cases the one that goes further.
    "test_rows_that_stay_have_what_a_new_column_gave_them_where_all_rows_come_again": (
        *("iceberg-merge-soft-False", "iceberg-history-hard-True"),
    ),
    "test_what_precedes_ddl_that_rewrites_a_table_is_kept": (
        *("iceberg-merge-soft-False", "iceberg-history-hard-True"),
    ),
    # A soft delete's rows are told apart in the statement that merges all of them.
    "test_a_dropped_column_has_the_values_of_its_own_rows": ("iceberg-hard-one_batch",),
    "test_json_is_variant": ("iceberg-soft",),
    # The middle one breaks between steps that are done and steps that are not.
    "test_a_batch_that_was_begun_with_an_application_for_each_step_is_ended": ("1", "3"),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        given = getattr(item, "callspec", None)
        if not isinstance(item, pytest.Function) or given is None:
            continue
        is_of_a_format = item.path.name in _FILES and given.params.get("format") in _REPEATED
        if is_of_a_format or given.id in _REPEATED_CASES.get(item.originalname, ()):
            item.add_marker(pytest.mark.repeated)


@pytest.fixture(scope="module", params=["deltalake", *(
    pytest.param(name, marks=pytest.mark.skipif(why is not None, reason=why or ""))
    for name in ("delta", "iceberg") for why in [lake_jars.lacking(name)]
)])  # fmt: skip
def format(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def lake_conf(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Settings of the session that all tests share, since a warm JVM merges in half the time."""
    return lake_jars.conf(tmp_path_factory.mktemp("warehouse"))


@pytest.fixture
def lake_of(format: str, spark_sessions: SparkSessions, lake_conf: dict[str, str], tmp_path: Path) -> LakeOf:
    if format == "deltalake":
        return lambda drive, shapes: DeltaRsLake(drive, tmp_path / "lake", shapes)
    spark = spark_sessions.get(**lake_conf)
    return lambda drive, shapes: CatalogLake(drive, spark, format, tmp_path, shapes)


@pytest.fixture
def begin(pg: Session, db: str, monkeypatch: pytest.MonkeyPatch, lake_of: LakeOf, format: str) -> Iterator[Begin]:
    with driving(pg, db, monkeypatch) as drive:
        # Tables join and leave at once. With less patience a batch would have fewer of the changes that a test makes.
        monkeypatch.setattr(looks, "WATCH_SECONDS", 0.1)

        def begin(
            *statements: str,
            mode: str | Mapping[str, str] = "merge",
            deletes: str = "hard",
            changes: str = "evolve",
            json_as: str = "string",
            **options: str,
        ) -> Lake:
            run(pg, *statements)

            def drive_into(files: FirstFiles) -> Driver:
                given = {"tables": "public.*", "envelope": "arrow", "onSchemaChange": "emit", FIRST_FILES: files.text}
                return drive(**given, **options)

            lake = lake_of(drive_into, Shapes.of(mode, deletes, format, changes, json_as))
            names = [s.split()[2] for s in statements if s.startswith("CREATE TABLE")]
            wait_until(is_same(lake, pg, *names))
            return lake

        yield begin
