"""A table that leaves before the initial snapshot has read it: the others go on, and it leaves as any other does."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator

import pytest
from driving import Driver, Row, driving, kinds, run
from psycopg2.extensions import connection as Session
from psycopg2.extensions import make_dsn
from replica import upserted
from roles import role
from watch import wait_until

from pg_cdc_source.errors import AccessError, OptionError, SchemaChangedError, ServerSetupError
from pg_cdc_source.spark.pgcdc import HAS_LIMITS

Drive = Callable[..., Driver]

# Spark 4.2 reads t in a batch of its own, before u; older ones read all tables in one.
TABLES = ("t", "u", "x")
CREATE_U = ("CREATE TABLE u (id int PRIMARY KEY, v text)", "INSERT INTO u VALUES (1, 'a'), (2, 'b')")
CREATE = (
    "CREATE TABLE t (id int PRIMARY KEY, v text)",
    "INSERT INTO t VALUES (1, 'a')",
    *CREATE_U,
    "CREATE TABLE x (id int PRIMARY KEY, v text)",
    "INSERT INTO x VALUES (1, 'a')",
)
DROP, UNPUBLISH = "DROP TABLE u", "ALTER PUBLICATION s DROP TABLE u"


@pytest.fixture
def drive(pg: Session, db: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Drive]:
    with driving(pg, db, monkeypatch) as drive:
        yield drive


def replica(driver: Driver) -> dict[str, dict[int, str]]:
    rows = [row for row in driver.rows if row["_change_type"] != "schema"]
    return {name: table for name, table in upserted([rows]).items() if table}


def source(pg: Session, *tables: str) -> dict[str, dict[int, str]]:
    return {f"public.{table}": dict(run(pg, f"SELECT id, v FROM {table}")) for table in tables}


def going_on(driver: Driver, until: Callable[[], object]) -> None:
    """Run batches until it is so."""

    def look() -> object:
        driver.batch()
        return until()

    wait_until(look, 60)


def of_u(driver: Driver) -> list[Row]:
    return [row for row in driver.rows if row["_table"] == "public.u"]


def begun(
    moment: str,
    end: tuple[str, ...],
    pg: Session,
    drive: Drive,
    publication: str = "CREATE PUBLICATION s FOR TABLE t, u, x",
    **options: str,
) -> Driver:
    """A stream that has not read u when these statements run."""
    run(pg, *CREATE, publication)
    driver = drive(**options)
    if HAS_LIMITS:
        driver.batch()
    if not HAS_LIMITS or moment != "down":
        # Spark has u's batch in its log.
        driver.attempt(read=False)
    change = ("INSERT INTO u VALUES (3, 'c')", *end, "INSERT INTO t VALUES (2, 'x')")
    if moment in ("down", "planned"):
        driver.stop()
        run(pg, *change)
        driver.start()
    elif moment == "running":
        run(pg, *change)
    else:
        # A table that is there is read.
        with contextlib.nullcontext() if end == (UNPUBLISH,) else pytest.raises(SchemaChangedError, match=r"public\.u"):
            driver.attempt(planned=lambda: run(pg, *change))
        driver.restart()
    return driver


MOMENTS = ["down", "planned", "running", "reading"] if HAS_LIMITS else ["planned", "running", "reading"]


@pytest.mark.parametrize("tables", ["public.*", "t,u,x"], ids=["pattern", "list"])
@pytest.mark.parametrize("end", [DROP, UNPUBLISH], ids=["dropped", "unpublished"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_the_other_tables_go_on(
    moment: str, end: str, tables: str, pg: Session, drive: Drive, caplog: pytest.LogCaptureFixture
) -> None:
    driver = begun(moment, (end,), pg, drive, tables=tables, onSchemaChange="ignore")
    going_on(driver, lambda: replica(driver).items() >= source(pg, "t", "x").items())
    # Its rows come where they can still be read.
    is_read = end == UNPUBLISH and moment == "running"
    assert kinds(of_u(driver)) == [*(["snapshot"] * 2 if is_read else []), "insert"]
    going_on(driver, lambda: "public.u" not in [member.name for member in driver.members])
    assert "publication s has lost public.u" in caplog.text
    assert is_read or "public.u left the stream before its rows as of" in caplog.text
    driver.restart()
    run(pg, "INSERT INTO t VALUES (3, 'y')")
    going_on(driver, lambda: replica(driver)["public.t"] == source(pg, "t")["public.t"])
    assert len(of_u(driver)) == (3 if is_read else 1)


@pytest.mark.parametrize("tables", ["public.*", "t,u,x"], ids=["pattern", "list"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_it_leaves_with_an_error_and_the_stream_goes_on_with_the_same_checkpoint(
    moment: str, tables: str, pg: Session, drive: Drive
) -> None:
    driver = begun(moment, (DROP,), pg, drive, tables=tables)
    for _ in range(2):
        text = driver.refusal("publication s has lost public.u, which was dropped", "onSchemaChange=ignore", rows=None)
        assert "start over" not in text
        driver.restart()
    driver.restart(onSchemaChange="emit")
    going_on(driver, lambda: [row for row in of_u(driver) if '"left"' in (row["after"] or "")])
    going_on(driver, lambda: replica(driver).items() >= source(pg, "t", "x").items())
    assert [kind for kind in kinds(of_u(driver)) if kind != "schema"] == ["insert"]


def test_one_that_joins_is_emptied_all_the_same_and_its_changes_follow(pg: Session, drive: Drive) -> None:
    """Its rows cannot be read any more. A table that had its name may have left rows in the sink."""
    run(pg, "CREATE TABLE t (id int PRIMARY KEY, v text)", "INSERT INTO t VALUES (1, 'a')",
        "CREATE PUBLICATION s FOR ALL TABLES")  # fmt: skip
    driver = drive(tables="public.*", onSchemaChange="ignore")
    driver.take(1)
    driver.stop()
    run(pg, *CREATE_U)
    driver.start()
    wait_until(lambda: driver.plan(read=False) and "public.u" in driver.planned_tables, 60)
    driver.stop()
    run(pg, "INSERT INTO u VALUES (3, 'c')", DROP, "INSERT INTO t VALUES (2, 'x')")
    driver.start()
    # The process that plans the next batch is not the one that has the rows before it.
    driver.batch()
    driver.restart()
    going_on(driver, lambda: replica(driver)["public.t"] == source(pg, "t")["public.t"])
    going_on(driver, lambda: "public.u" not in [member.name for member in driver.members])
    assert kinds(of_u(driver)) == ["truncate", "insert"]


@pytest.mark.parametrize("moment", MOMENTS)
def test_rows_say_its_layout_what_is_missing_and_that_it_has_left(moment: str, pg: Session, drive: Drive) -> None:
    driver = begun(moment, (DROP,), pg, drive, tables="public.*", onSchemaChange="emit")
    going_on(driver, lambda: [row for row in of_u(driver) if '"left"' in (row["after"] or "")])
    rows = of_u(driver)
    said = [json.loads(row["after"]) for row in rows if row["_change_type"] == "schema"]
    assert [[change["change"] for change in row["changes"]] for row in said] == [[], ["gap"], ["left"]]
    assert [[column["name"] for column in row["columns"]] for row in said] == [["id", "v"], ["id", "v"], []]
    assert "before its first rows were read" in said[1]["changes"][0]["why"]
    assert kinds(rows) == ["schema", "schema", "insert", "schema"]
    assert replica(driver).items() >= source(pg, "t", "x").items()


@pytest.mark.parametrize("tables", ["public.*", "t,u,x"], ids=["pattern", "list"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_one_that_was_created_again_leaves_and_joins(moment: str, tables: str, pg: Session, drive: Drive) -> None:
    again = (DROP, "CREATE TABLE u (id int PRIMARY KEY, v text, w int)", "INSERT INTO u VALUES (7, 'new')")
    driver = begun(moment, again, pg, drive, "CREATE PUBLICATION s FOR ALL TABLES", tables=tables)
    going_on(driver, lambda: replica(driver) == source(pg, *TABLES))
    rows = kinds(of_u(driver))
    assert rows[rows.index("truncate") :] == ["truncate", "snapshot"]
    assert "snapshot" not in rows[: rows.index("truncate")]


@pytest.mark.skipif(not HAS_LIMITS, reason="one batch has all tables, by the names that they have in its end")
@pytest.mark.parametrize("on_new_table", ["snapshot", "fail"])
def test_one_that_is_left_out_neither_joins_nor_fails(on_new_table: str, pg: Session, drive: Drive) -> None:
    run(pg, *CREATE, "CREATE PUBLICATION s FOR ALL TABLES")
    driver = drive(tables="public.*, -public.u, -public.later", onNewTable=on_new_table)
    going_on(driver, lambda: replica(driver) == source(pg, "t", "x"))
    create = "CREATE TABLE {0} (id int PRIMARY KEY, v text); INSERT INTO {0} VALUES (1, 'new')"
    run(pg, "INSERT INTO u VALUES (3, 'c')", create.format("later"), "INSERT INTO t VALUES (2, 'x')")
    going_on(driver, lambda: replica(driver) == source(pg, "t", "x"))
    driver.restart()
    run(pg, "INSERT INTO later VALUES (2, 'c')", "UPDATE u SET v = 'd'", "INSERT INTO t VALUES (3, 'x')")
    going_on(driver, lambda: replica(driver) == source(pg, "t", "x"))


def test_a_partition_is_not_left_out_of_its_root(pg: Session, drive: Drive) -> None:
    run(pg, "CREATE TABLE r (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE r1 PARTITION OF r FOR VALUES FROM (0) TO (10)")  # fmt: skip
    expected = ("tables: -public.r1 cannot be left out, because its changes come under public.r",)
    drive(tables="public.*, -public.r1").refusal(*expected, kind=OptionError, rows=None)


def test_one_that_was_renamed_is_read_under_its_new_name(pg: Session, drive: Drive) -> None:
    run(pg, *CREATE, "CREATE PUBLICATION s FOR TABLE t, u, x")
    driver = drive(tables="public.*")
    driver.attempt(read=False)
    driver.stop()
    run(pg, "ALTER TABLE u RENAME TO y", "INSERT INTO y VALUES (3, 'c')")
    driver.start()
    going_on(driver, lambda: replica(driver) == source(pg, "t", "x", "y"))


def test_the_one_table_of_a_stream_is_an_error(pg: Session, drive: Drive) -> None:
    run(pg, *CREATE_U, "CREATE PUBLICATION s FOR ALL TABLES")
    driver = drive(dbtable="u")
    driver.attempt(read=False)
    run(pg, DROP)
    driver.refusal("publication s has lost public.u, which was dropped", "onNewTable=snapshot")
    driver.stop()
    with pytest.raises(AccessError, match="u does not exist"):
        driver.start()
    run(pg, *CREATE_U)
    for _ in range(2):
        driver.restart()
        driver.refusal("public.u was dropped and created again", "onNewTable=snapshot")
    driver.restart(onNewTable="snapshot")
    rows = driver.take(3)
    assert sorted(kinds(rows)) == ["snapshot", "snapshot", "truncate"]


def test_the_one_table_of_a_stream_that_is_not_published_any_more_is_an_error(pg: Session, drive: Drive) -> None:
    run(pg, *CREATE_U, "CREATE PUBLICATION s FOR TABLE u")
    driver = drive(dbtable="u")
    driver.attempt(read=False)
    driver.stop()
    run(pg, UNPUBLISH)
    driver.start()
    driver.refusal("publication s does not have public.u", kind=ServerSetupError)


# --- tables that the option names one by one --------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["fail", "ignore"])
def test_a_name_that_never_was_the_streams_is_an_error(mode: str, pg: Session, drive: Drive) -> None:
    run(pg, *CREATE, "CREATE PUBLICATION s FOR TABLE t, u, x")
    driver = drive(tables="t,typo", onSchemaChange=mode)
    driver.refusal("typo does not exist", kind=AccessError)
    driver.restart(tables="t")
    driver.take(1)
    if mode == "fail":
        driver.restart(tables="t,typo")
        driver.refusal("typo does not exist", kind=AccessError)


@pytest.mark.parametrize("mode", ["fail", "ignore"])
def test_a_listed_table_that_was_renamed_is_not_taken_for_one_that_left(mode: str, pg: Session, drive: Drive) -> None:
    run(pg, *CREATE, "CREATE PUBLICATION s FOR TABLE t, u, x")
    driver = drive(tables="t,u,x", onSchemaChange=mode)
    going_on(driver, lambda: replica(driver) == source(pg, *TABLES))
    driver.batch()
    driver.stop()
    run(pg, "ALTER TABLE u RENAME TO y", "INSERT INTO y VALUES (3, 'c')")
    driver.start()
    driver.refusal("u does not exist", kind=AccessError)
    driver.restart(tables="t,x,y")
    going_on(driver, lambda: replica(driver).get("public.y", {}).get(3) == "c")


def test_listed_tables_that_were_out_come_back_while_another_one_is_gone(pg: Session, drive: Drive) -> None:
    run(pg, *CREATE, "CREATE PUBLICATION s FOR TABLE t, u, x")
    driver = drive(tables="t,u,x", onSchemaChange="ignore")
    going_on(driver, lambda: replica(driver) == source(pg, *TABLES))
    run(pg, DROP, "ALTER PUBLICATION s DROP TABLE x")
    going_on(driver, lambda: [member.name for member in driver.members] == ["public.t"])
    run(pg, "ALTER PUBLICATION s ADD TABLE x", "INSERT INTO x VALUES (2, 'b')")
    going_on(driver, lambda: replica(driver)["public.x"] == source(pg, "x")["public.x"])


def test_a_listed_table_that_the_role_may_not_find_any_more_has_not_left(
    pg: Session, db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(
        pg,
        *CREATE,
        "CREATE SCHEMA other",
        "ALTER TABLE u SET SCHEMA other",
        "CREATE PUBLICATION s FOR TABLE t, other.u",
    )
    as_role = role(pg, db, "REPLICATION")
    with as_role as login, driving(pg, make_dsn(**login), monkeypatch) as drive:
        name = login["user"]
        run(pg, f"GRANT USAGE ON SCHEMA other TO {name}", f"GRANT SELECT ON t, other.u TO {name}")
        driver = drive(tables="t,other.u", onSchemaChange="ignore")
        going_on(driver, lambda: len(driver.rows) == 3)
        driver.stop()
        run(pg, f"REVOKE USAGE ON SCHEMA other FROM {name}")
        driver.start()
        driver.refusal("permission denied for schema other", "USAGE", kind=AccessError)
        driver.stop()
