"""A stream continues from the checkpoints that release 0.1.0 wrote.

The offsets are that release's texts, with the identity and the positions of the server at hand.
"""

from __future__ import annotations

import json

import pytest
from driving import SLOT, Drive, Row, run, values
from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import DefiniteError
from pg_cdc_source.offsets import Lsn


@pytest.fixture
def head(pg: Session) -> str:
    """The part that all offsets of a stream begin with; tables, publication and slot are as a stream made them."""
    run(pg, 'CREATE SCHEMA "order"', 'CREATE TABLE "order".items (id int PRIMARY KEY)')
    run(pg, 'CREATE TABLE public."user" (id int PRIMARY KEY)', 'CREATE TABLE public."User 2" (id int PRIMARY KEY)')
    run(pg, 'INSERT INTO "order".items VALUES (1)', 'INSERT INTO public."user" VALUES (1)')
    run(pg, 'INSERT INTO public."User 2" VALUES (1)')
    run(pg, f'CREATE PUBLICATION {SLOT} FOR TABLE "order".items, public."user", public."User 2"')
    ((origin,),) = run(pg, f"SELECT lsn::text FROM pg_create_logical_replication_slot('{SLOT}', 'pgoutput')")
    ((system, timeline, database),) = run(
        pg,
        "SELECT system_identifier::text, timeline_id, current_database()::text"
        " FROM pg_control_system(), pg_control_checkpoint()",
    )
    return (
        f'{{"version": 1, "system": "{system}", "timeline": {timeline}, "database": "{database}", "slot": "{SLOT}", '
        f'"origin": "{origin}", '
    )


TABLES = '"order".items,public."user",public."User 2"'


def before_origin(head: str) -> Lsn:
    return Lsn(Lsn.parse(json.loads(head + '"lsn": ""}')["origin"]) - 1)


def named(rows: list[Row]) -> list[tuple[str, str, object]]:
    return [
        (table, kind, json.loads(after)["id"]) for table, kind, after in values(rows, "_table", "_change_type", "after")
    ]


def test_an_initial_snapshot_continues_with_the_tables_that_were_not_done(pg: Session, drive: Drive, head: str) -> None:
    driver = drive(tables=TABLES)
    driver.continue_from(
        head + '"snapshot": {"tables": "order.items,public.\\"User 2\\",public.user", "done": 1}, '
        f'"lsn": "{before_origin(head)}"}}'
    )
    assert named(driver.take(2)) == [('public."User 2"', "snapshot", 1), ("public.user", "snapshot", 1)]
    run(pg, 'INSERT INTO public."user" VALUES (2)', 'INSERT INTO "order".items VALUES (2)')
    assert named(driver.take(2)) == [("public.user", "insert", 2), ("order.items", "insert", 2)]


def test_a_stream_does_not_continue_within_a_commit(drive: Drive, head: str) -> None:
    """It counted the changes of the commit, and PostgreSQL may send others of it now."""
    driver = drive(tables=TABLES)
    driver.continue_from(head + f'"lsn": "{before_origin(head)}", "seq": 2}}')
    expected = "by a number of changes that this release cannot find again", "the release that wrote the checkpoint"
    driver.refusal(*expected, kind=DefiniteError)
