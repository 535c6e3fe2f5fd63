"""Fixtures: a PostgreSQL server for the session, a database for each test, and Spark."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator

import leftovers
import pytest
from databases import Databases, connect
from jdbc import JDBC_DRIVER
from psycopg2.extensions import connection as Session
from pyspark.sql import SparkSession
from servers import postgres_server
from sessions import JVM_OPTIONS, SparkSessions

# Spark's launcher gives these to each driver's JVM, those of the programs that tests run included.
os.environ.setdefault("SPARK_SUBMIT_OPTS", JVM_OPTIONS)
# Nothing multiplies matrices, but NumPy would start threads for that in each of Spark's Python processes: a quarter of
# what its import takes.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# The longest files, by what `pytest --durations=0` shows; a process that begins one last would end alone.
LONGEST_FIRST = (
    *(
        "test_batches.py",
        "test_modes.py",
        "test_catalogs.py",
        "test_spark_tables.py",
        # Short ones, but of the lake's Spark, which a process that has it need not start again.
        "test_json.py",
        "test_delta_steps.py",
        "test_connect.py",
        "test_crashes.py",
        "test_examples.py",
        "test_sparks.py",
        "test_mirror.py",
        "test_oracle.py",
        "test_jdbc_snippets.py",
        "test_rewind.py",
        "test_copies.py",
        "test_extension_types.py",
        "test_joining.py",
        "test_bench.py",
        "test_emitted_layouts.py",
        "test_stream.py",
        "test_safety.py",
        "test_schema.py",
    ),
    *("test_consistency.py", "test_stream_values.py", "test_pgbench.py", "test_seen.py"),
    *("test_keeper.py", "test_memory.py", "test_documents.py"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files. Files may run in several processes (pytest-xdist), each with servers of its own."""
    place = {name: number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))


@pytest.fixture(scope="session")
def session_server() -> Iterator[str]:
    """URL of a superuser of a server that decodes logically."""
    with postgres_server() as url:
        yield url


@pytest.fixture(scope="session")
def server(session_server: str) -> str:
    """The server of a test; a file may have another."""
    return session_server


@pytest.fixture(scope="session")
def databases() -> Callable[[str], Databases]:
    """The databases of a server."""
    return functools.cache(Databases)


@pytest.fixture
def db(server: str, databases: Callable[[str], Databases]) -> Iterator[str]:
    """Conninfo of the superuser in a database of the test's own. A slot that the test leaves there is an error."""
    with databases(server).one() as conninfo:
        yield conninfo


@pytest.fixture
def pg(db: str) -> Iterator[Session]:
    """A session in the test's database, in autocommit mode."""
    with connect(db) as session:
        yield session


@pytest.fixture(scope="session")
def spark_sessions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSessions]:
    sessions = SparkSessions(tmp_path_factory.mktemp("spark"))
    yield sessions
    sessions.end_jvm()


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_left(session_server: str, spark_sessions: SparkSessions) -> Iterator[None]:
    """Look when all tests of this process are over, and the JVM is gone: its keepers, sessions, slots and files are."""
    yield
    spark_sessions.end_jvm()
    leftovers.expect_none(session_server, spark_sessions.scratch)


@pytest.fixture
def spark_session(spark_sessions: SparkSessions) -> Callable[..., SparkSession]:
    """``spark_session(master=..., **conf)``: the session of this kind; the one of another kind ends."""
    return spark_sessions.get


@pytest.fixture
def spark(spark_session: Callable[..., SparkSession]) -> SparkSession:
    """A session of two threads, kept from test to test while no test asks for another kind."""
    return spark_session()


@pytest.fixture(scope="session")
def jdbc_driver() -> None:
    """Say that sessions have PostgreSQL's JDBC driver."""
    if not JDBC_DRIVER.exists():
        pytest.fail(f"{JDBC_DRIVER} is missing: apt-get install libpostgresql-jdbc-java")
