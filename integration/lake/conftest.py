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

LakeOf = Callable[[Drive, Shapes], Lake]

# Both of Spark's formats run the same code in these: what differs has tests of its own (test_spark_tables.py,
# test_delta_steps.py). Delta's merges take three times as long as Iceberg's. delta-rs has no code for a Spark, so a run
# on one that has both formats repeats that on the newest one, which has none.
_FILES = ("test_altered.py", "test_batches.py", "test_modes.py")
_REPEATED = ("delta",) if lake_jars.lacking("iceberg") else ("delta", "deltalake")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        given = getattr(item, "callspec", None)
        if item.path.name in _FILES and given is not None and given.params.get("format") in _REPEATED:
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
