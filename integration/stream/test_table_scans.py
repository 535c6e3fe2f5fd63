"""What a stream knows of its tables is looked up once, and again for those that have changed."""

from __future__ import annotations

from typing import Any

import pytest
from driving import run
from psycopg2.extensions import connection as Session

from pg_cdc_source.offsets import Lsn
from pg_cdc_source.options.stream_options import parse_stream_options
from pg_cdc_source.postgres import publication
from pg_cdc_source.snapshot import scan
from pg_cdc_source.stream.stream_plan import StreamPlan, plan_stream
from pg_cdc_source.stream.table_scans import TableScans


def test_only_tables_that_have_changed_are_looked_up_again(
    db: str, pg: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(pg, "CREATE TABLE t (id int PRIMARY KEY, v text)", "CREATE TABLE u (id int PRIMARY KEY, v text)",
        "CREATE PUBLICATION s FOR TABLE t, u")  # fmt: skip
    options = parse_stream_options({"url": db, "tables": "public.*", "slot": "s"})
    scans, looked_up = TableScans(), []
    plan_in = scan.plan_in

    def noted(session: Session, server: Any, spec: scan.ScanSpec, *rest: Any) -> scan.Plan:
        looked_up.append(spec.what)
        return plan_in(session, server, spec, *rest)

    monkeypatch.setattr(scan, "plan_in", noted)

    def plan() -> StreamPlan:
        looked_up.clear()
        return plan_stream(pg, options, publication.require_publication(pg, options.publications), Lsn(0), scans=scans)

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
        assert now == plan_stream(pg, options, publication.require_publication(pg, options.publications), Lsn(0))
    scans.keep({planned.oid for planned in now.planned if planned.name == "public.u"})
    plan()
    assert looked_up == ["public.t"]
