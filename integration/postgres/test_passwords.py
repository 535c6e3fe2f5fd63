"""A password that is valid for two seconds: snapshots and streams go on, and lost sessions come back with new ones."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from databases import connect
from driving import querying, run
from frames import load
from psycopg2 import sql
from psycopg2.extensions import connection as Session
from psycopg2.extensions import make_dsn
from pyspark.sql import SparkSession
from refusals import refusal
from roles import role
from watch import holders, readers, session_names, wait_until

from pg_cdc_source.errors import ConnectError
from pg_cdc_source.options.given import parse_connection_options
from pg_cdc_source.postgres.connection import connect as connect_source

VALID_SECONDS = 2.0
ROWS = 96
SECONDS_PER_ROW = 0.1


class Rotation:
    """Gives a role a new password again and again, and writes the present one to ``file``."""

    def __init__(self, server: str, user: str, file: Path) -> None:
        self.file, self.passwords = file, [""]
        self._server, self._user = server, user
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Rotation:
        self._thread.start()
        self.wait(1)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def wait(self, times: int) -> None:
        """Wait until the password was replaced so often."""
        until = len(self.passwords) + times
        wait_until(lambda: len(self.passwords) >= until)

    def _run(self) -> None:
        with connect(self._server) as session, session.cursor() as cursor:
            while True:
                password = f"Token-{len(self.passwords)}-{os.urandom(4).hex()}"
                cursor.execute(sql.SQL("ALTER ROLE {} PASSWORD %s").format(sql.Identifier(self._user)), (password,))
                new = self.file.with_suffix(".new")
                new.write_text(f"{password}\n")
                new.replace(self.file)
                self.passwords.append(password)
                if self._stop.wait(VALID_SECONDS):
                    return


@pytest.fixture
def reader(pg: Session, db: str) -> Iterator[dict[str, str]]:
    with role(pg, db, "REPLICATION") as login:
        yield login


@pytest.fixture
def rotation(server: str, reader: dict[str, str], tmp_path: Path) -> Iterator[Rotation]:
    with Rotation(server, reader["user"], tmp_path / "token") as rotation:
        yield rotation


@pytest.fixture
def url(reader: dict[str, str]) -> str:
    return str(make_dsn(**{name: value for name, value in reader.items() if name != "password"}))


def end(pg: Session, names: list[str]) -> None:
    with pg.cursor() as cursor:
        cursor.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name = ANY (%s)",
            (names,),
        )


def test_the_password_of_a_moment_ago_is_refused(url: str, rotation: Rotation) -> None:
    old = rotation.file.read_text().strip()
    rotation.wait(1)
    text = refusal_text({"url": url, "passwordCommand": f"echo {old}"})
    assert "check user, password" in text
    assert old not in text
    connect_source(parse_connection_options({"url": url, "passwordCommand": f"cat {rotation.file}"}), "test").close()


def refusal_text(options: dict[str, str]) -> str:
    with pytest.raises(ConnectError) as caught:
        connect_source(parse_connection_options(options), "test").close()
    return str(caught.value)


def asked_by(option: str, spark: SparkSession, user: str, rotation: Rotation, directory: Path) -> dict[str, str]:
    """The option that asks for the password of a moment."""
    if option == "passwordCommand":
        return {option: f"cat {rotation.file}"}
    # As a user ships it: no Python of Spark's finds the module by itself. It may print, also in the keeper.
    module = directory / f"tokens_of_{user}.py"
    module.write_text(
        f"def token(host, port, user, database):\n    assert user == {user!r}, user\n"
        "    print('asked', flush=True)\n"
        f"    with open({str(rotation.file)!r}) as file:\n        return file.read().strip()\n"
    )
    spark.sparkContext.addPyFile(str(module))
    return {option: f"{module.stem}:token"}


@pytest.mark.matrix("passwordCommand, passwordProvider")
def test_a_function_is_asked_for_the_password_of_each_session(
    spark: SparkSession, pg: Session, url: str, reader: dict[str, str], rotation: Rotation, tmp_path: Path
) -> None:
    run(pg, "CREATE TABLE t AS SELECT 1 AS id", f"GRANT SELECT ON t TO {reader['user']}")
    asked = asked_by("passwordProvider", spark, reader["user"], rotation, tmp_path)
    for _ in range(2):
        # An LSN takes sessions of the keeper's.
        assert load(spark, url, dbtable="t", lsnColumn="lsn", **asked).count() == 1
        rotation.wait(1)


def test_a_snapshot_outlasts_its_passwords(
    spark: SparkSession, pg: Session, db: str, url: str, reader: dict[str, str], rotation: Rotation
) -> None:
    run(
        pg,
        # Five rows in a block.
        f"CREATE TABLE t AS SELECT i AS id, repeat('x', 1500) AS filler FROM generate_series(1, {ROWS}) AS i",
        f"GRANT SELECT ON t TO {reader['user']}",
    )
    asked = {"passwordCommand": f"cat {rotation.file}"}
    query = f"SELECT id, pg_sleep({SECONDS_PER_ROW})::text AS slept FROM t"
    several = [load(spark, url, query=f"{query} WHERE id % 4 = {part}", **asked) for part in range(4)]
    slow = f"pg_sleep({SECONDS_PER_ROW}) IS NOT NULL"
    table = load(spark, url, dbtable="t", columns="id", numPartitions=16, where=slow, **asked)
    union = table
    for df in several:
        union = union.union(df.select("id"))
    done = threading.Event()

    def disturb() -> None:
        """End what reads the table, and one of the two sessions that hold the snapshot, after each new password."""
        with connect(db) as own:
            while not done.is_set():
                rotation.wait(1)
                if own.server_version >= 140000:  # before, a table is one range, and a task that lost it begins anew
                    end(own, [name for name in readers(own) if not name.endswith("?0")])
                if len(held := holders(own)) == 2:
                    end(own, held[:1])

    before = len(rotation.passwords)
    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        found = sorted(row.id for row in union.collect())
    finally:
        done.set()
        thread.join()
    assert found == sorted([*range(1, ROWS + 1)] * 2)
    assert len(rotation.passwords) - before >= 3
    # The plan shows which option is set, and not to what. Tests' sessions leave fields out otherwise.
    spark.conf.set("spark.sql.debug.maxToStringFields", "1000")
    shown = union._jdf.queryExecution().toString()
    assert not any(password in shown for password in rotation.passwords[1:])


@pytest.mark.matrix("passwordCommand, passwordProvider")
@pytest.mark.parametrize("option", ["passwordCommand", "passwordProvider"])
def test_a_stream_outlasts_its_passwords(
    spark: SparkSession, pg: Session, url: str, reader: dict[str, str], rotation: Rotation, tmp_path: Path, option: str
) -> None:
    run(
        pg,
        "CREATE TABLE t (id int PRIMARY KEY)",
        f"GRANT SELECT ON t TO {reader['user']}",
        "INSERT INTO t SELECT generate_series(1, 10)",
        "CREATE PUBLICATION p FOR TABLE t",
    )
    asked = asked_by(option, spark, reader["user"], rotation, tmp_path)
    options = {**asked, "dbtable": "t", "publication": "p"}
    with querying(spark, tmp_path, pg, url, **options) as query:
        query.start()
        query.take(10)
        for i in range(11, 15):
            rotation.wait(1)
            ended = wait_until(lambda: session_names(pg, "pgcdc:%"))
            end(pg, ended)
            run(pg, f"INSERT INTO t VALUES ({i})")
            query.take(i)
        # And in a process that starts with a checkpoint.
        query.stop()
        rotation.wait(1)
        run(pg, "INSERT INTO t VALUES (15)")
        query.start()
        query.take(15)
        assert sorted(row["id"] for row in query.rows) == list(range(1, 16))


def test_a_keeper_ends_with_the_command_that_is_refused(
    spark: SparkSession, pg: Session, url: str, reader: dict[str, str], rotation: Rotation, tmp_path: Path
) -> None:
    """A keeper goes by driver, server, database and role. One with a bad command must not outlive it."""
    run(pg, "CREATE TABLE t AS SELECT 1 AS id", f"GRANT SELECT ON t TO {reader['user']}")
    switch = tmp_path / "switch"
    switch.write_text(f"cat {rotation.file}\n")
    # The keeper stays for as long as it holds a snapshot.
    first = load(spark, url, dbtable="t", passwordCommand=f"sh {switch}", snapshotIdle="30s")
    assert first.count() == 1
    switch.write_text("echo wrong\n")
    # Planning gets in with another command; the keeper that runs has only the first one, and an LSN takes a session.
    good = {"dbtable": "t", "passwordCommand": f"cat {rotation.file}", "lsnColumn": "lsn"}
    refusal(lambda: load(spark, url, **good).count(), "SnapshotLostError", "load the DataFrame again")
    assert load(spark, url, **good).count() == 1
    refusal(lambda: load(spark, url, dbtable="t", passwordCommand=f"sh {switch}").count(), "ConnectError", "password")
