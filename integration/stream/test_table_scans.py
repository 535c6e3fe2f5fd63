"""What a stream knows of its tables is looked up once, and again for those that have changed."""

from __future__ import annotations

from typing import Any

import pytest
from databases import connect
from driving import run
from psycopg2.extensions import connection as Session
from roles import conninfo, role

from pg_cdc_source.errors import AccessError
from pg_cdc_source.options.stream_options import parse_stream_options
from pg_cdc_source.postgres import publication
from pg_cdc_source.postgres.columns import describe_columns
from pg_cdc_source.postgres.horizon import NOTHING
from pg_cdc_source.snapshot import scan
from pg_cdc_source.stream.tables import table_scans
from pg_cdc_source.stream.tables.stream_plan import StreamPlan, plan_stream
from pg_cdc_source.stream.tables.table_scans import TableScans


def test_only_tables_that_have_changed_are_looked_up_again(
    db: str, pg: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(pg, "CREATE TABLE t (id int PRIMARY KEY, v text)", "CREATE TABLE u (id int PRIMARY KEY, v text)",
        "CREATE PUBLICATION s FOR TABLE t, u")  # fmt: skip
    options = parse_stream_options({"url": db, "tables": "public.*", "slot": "s"})
    scans, looked_up = TableScans(), []
    plan_in = scan.plan_in

    def noted(session: Session, server: Any, spec: scan.ScanSpec, *rest: Any, **more: Any) -> scan.Plan:
        looked_up.append(spec.what)
        return plan_in(session, server, spec, *rest, **more)

    monkeypatch.setattr(scan, "plan_in", noted)

    def plan() -> StreamPlan:
        looked_up.clear()
        return plan_stream(pg, options, publication.require_publication(pg, options.publications), NOTHING, scans=scans)

    first = plan()
    assert looked_up == ["public.t", "public.u"]
    assert plan() == first
    assert looked_up == []
    for statement in (
        "ALTER TABLE u ALTER v TYPE varchar(9)",
        "ALTER TABLE u ADD w int",
        "ALTER TABLE u RENAME w TO x",
        "ALTER PUBLICATION s SET TABLE t, u WHERE (id > 0)" if pg.server_version >= 150000 else "ALTER TABLE u DROP x",
        "DROP TABLE u; CREATE TABLE u (id int PRIMARY KEY, v text); ALTER PUBLICATION s ADD TABLE u",
    ):
        run(pg, statement)
        now = plan()
        assert looked_up == ["public.u"], statement
        assert now == plan_stream(pg, options, publication.require_publication(pg, options.publications), NOTHING)
    scans.keep({planned.oid for planned in now.planned if planned.name == "public.u"})
    plan()
    assert looked_up == ["public.t"]


TYPES = (
    "a int NOT NULL, b numeric(10,2), c varchar(9), d text[], e mood, f timestamptz(3), g int4range, h numeric[], "
    'i interval day to second(2), j mood[], k point, l bit(3), m bpchar(4), n "char", o name, p xml'
)


def test_columns_that_the_catalog_tells_are_those_of_a_select(
    db: str, pg: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(pg, "CREATE TYPE mood AS ENUM ('fine')", "CREATE DOMAIN positive AS numeric(9,1) CHECK (VALUE > 0)",
        f"CREATE TABLE t ({TYPES})", "CREATE TABLE u (id int PRIMARY KEY, v positive, w positive[])",
        "CREATE PUBLICATION s FOR TABLE t, u")  # fmt: skip
    options = parse_stream_options({"url": db, "tables": "public.*", "slot": "s", "keyless": "insertOnly"})
    described = []

    def noted(session: Session, select: Any, doing: str, **more: Any) -> Any:
        described.append(doing)
        return describe_columns(session, select, doing, **more)

    monkeypatch.setattr(scan, "describe_columns", noted)

    def plan() -> StreamPlan:
        return plan_stream(pg, options, publication.require_publication(pg, options.publications), NOTHING)

    told = plan()
    assert described == ["reading public.u"]
    monkeypatch.setattr(table_scans, "read_columns", lambda *_: {})
    assert plan() == told
    assert len(described) == 3


def test_a_table_that_may_not_be_read_is_refused_as_by_a_select(db: str, pg: Session) -> None:
    run(pg, "CREATE TABLE t (id int PRIMARY KEY, v text)", "CREATE TABLE u (id int PRIMARY KEY, v text)",
        "CREATE TABLE w (id int PRIMARY KEY, v text)", "ALTER TABLE w ENABLE ROW LEVEL SECURITY",
        "CREATE PUBLICATION s FOR TABLE t, u, w")  # fmt: skip
    with role(pg, db) as reader:
        run(pg, f"GRANT SELECT ON t, w TO {reader['user']}", f"GRANT SELECT (id, v) ON u TO {reader['user']}")
        found = {name: ({"url": conninfo(reader), "tables": f"public.{name}", "slot": "s"}) for name in "tuw"}
        with connect(conninfo(reader)) as session:
            run(session, "SET row_security = off")

            def plan(name: str) -> StreamPlan:
                options = parse_stream_options(found[name])
                return plan_stream(
                    session, options, publication.require_publication(session, options.publications), NOTHING
                )

            assert [planned.name for name in "tu" for planned in plan(name).planned] == ["public.t", "public.u"]
            with pytest.raises(AccessError, match="row-level security"):
                plan("w")
            run(pg, f"REVOKE SELECT (v) ON u FROM {reader['user']}")
            with pytest.raises(AccessError, match="permission denied for table u"):
                plan("u")
