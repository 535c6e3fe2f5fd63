"""Spark's workers find another copy of the package than the user's process: it is noticed, and rows stay right."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from clusters import standalone_cluster
from frames import load
from psycopg2.extensions import connection as Session
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession
from sessions import CONF, SparkSessions

import pg_cdc_source
from pg_cdc_source import register
from pg_cdc_source.demo.local_spark import end_jvm, start_session, stop_session
from pg_cdc_source.spark.pgsnapshot import PgSnapshotDataSource
from pg_cdc_source.values import native

assert pg_cdc_source.__file__ is not None
INSTALLED = Path(pg_cdc_source.__file__).parent
OTHER_VERSION = "99.1"
BUILT = any((INSTALLED / "values").glob("_accelerator*.so"))

Start = Callable[[str, Path], SparkSession]


def checkout(directory: Path, version: str = pg_cdc_source.__version__) -> Path:
    """Make a copy of the package in which nothing was compiled."""
    copied = directory / "pg_cdc_source"
    shutil.copytree(INSTALLED, copied, ignore=shutil.ignore_patterns("_accelerator*.so", "__pycache__"))
    (copied / "_version.py").write_text(f'__version__ = "{version}"\n')
    return copied


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def start(spark_sessions: SparkSessions, log: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """``start(master, directory)``: a session whose JVM works in ``directory`` and prints to ``log``."""
    spark_sessions.end_jvm()
    monkeypatch.delenv(native.ENVIRONMENT, raising=False)
    started: list[SparkSession] = []

    def start(master: str, directory: Path) -> SparkSession:
        started.append(start_session(master, CONF, directory, log=log))
        return started[-1]

    yield start
    for spark in started:
        stop_session(spark)
    end_jvm()


@pytest.fixture
def table(pg: Session) -> None:
    with pg.cursor() as cursor:
        cursor.execute("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t SELECT generate_series(1, 100)")


def ids(spark: SparkSession, db: str) -> list[int]:
    return sorted(row.id for row in load(spark, db, dbtable="t").collect())


@pytest.mark.usefixtures("table")
@pytest.mark.skipif(not BUILT, reason="the installed package has no accelerator that could be hidden")
def test_a_checkout_as_working_directory_is_a_warning(start: Start, log: Path, db: str, tmp_path: Path) -> None:
    copied = checkout(tmp_path)
    # Found by Spark: nothing comes from this process.
    spark = start("local[2]", tmp_path)
    assert ids(spark, db) == list(range(1, 101))
    text = log.read_text()
    assert "pg_cdc_source reads about half as fast as it could, without its C accelerator" in text
    assert f"in {copied} on host" in text
    assert f"hides the one in {INSTALLED.resolve()}" in text
    assert "Remedy: install the same wheel" in text


@pytest.mark.usefixtures("table")
def test_another_version_as_working_directory_is_an_error(start: Start, db: str, tmp_path: Path) -> None:
    copied = checkout(tmp_path, OTHER_VERSION)
    spark = start("local[2]", tmp_path)
    try:
        spark.dataSource.register(PgSnapshotDataSource)
    except AnalysisException:
        pytest.skip("Spark 4.0 keeps the class that its look-up finds: nothing comes from the user's process")
    expect_two_versions(spark, db, copied)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The master of a cluster whose executors have another version, and where that lies."""
    copied = checkout(tmp_path / "node", OTHER_VERSION)
    with ExitStack() as cluster:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("PYTHONPATH", str(copied.parent))
            master = cluster.enter_context(standalone_cluster(tmp_path / "cluster", workers=1))
        yield master, copied


@pytest.mark.usefixtures("table")
def test_another_version_on_the_executors_is_an_error(
    node: tuple[str, Path], start: Start, db: str, tmp_path: Path
) -> None:
    master, copied = node
    (tmp_path / "driver").mkdir()
    spark = start(master, tmp_path / "driver")
    register(spark)
    expect_two_versions(spark, db, copied)


def expect_two_versions(spark: SparkSession, db: str, copied: Path) -> None:
    with pytest.raises(Exception, match="two versions of pg_cdc_source take part in one read") as raised:
        ids(spark, db)
    assert f"{pg_cdc_source.__version__} in {INSTALLED.resolve()} on host" in str(raised.value)
    assert f"{OTHER_VERSION} in {copied} on host" in str(raised.value)
    assert "Remedy: install the same wheel" in str(raised.value)
