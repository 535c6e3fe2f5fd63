"""Which options a mirror does not take."""

from __future__ import annotations

from typing import Any

import pytest

from pg_cdc_source.errors import OptionError
from pg_cdc_source.mirrors.query import mirror, mirror_at

GIVEN: dict[str, Any] = {
    "url": "postgresql://nowhere",
    "slot": "s",
    "target": "lake.shop.{table}",
    "format": "iceberg",
    "checkpoint": "/checkpoint",
}
LOG = {"public.t": "append"}


class Begun(Exception):  # noqa: N818 - ends a call, and is no error
    """A mirror's options have been taken."""


class Session:
    """The least of a Spark session: it ends whoever uses it."""

    def __getattr__(self, name: str) -> Any:
        raise Begun


@pytest.mark.parametrize("option", [
    {"startFrom": "now"}, {"startFrom": "slot"}, {"STARTFROM": " Now"}, {"onNewTable": "changes"},
    {"onTruncate": "ignore"},
])  # fmt: skip
def test_what_leaves_rows_out_is_for_logs_alone(option: dict[str, str]) -> None:
    session: Any = Session()
    given = {**GIVEN, **option}
    for tables, mode in (("public.*", "merge"), ("public.*", "history"), (["public.t", "public.u"], LOG),
                         ("public.*", LOG), ("t", LOG)):  # fmt: skip
        with pytest.raises(OptionError, match="would not have PostgreSQL's rows") as refused:
            mirror(session, **given, tables=tables, mode=mode)
        assert "mode append" in refused.value.remedy
    for tables, mode in (("public.*", "append"), ("public.t", LOG), ("*", {"*": "append", "public.t": "append"})):
        with pytest.raises(Begun):
            mirror(session, **given, tables=tables, mode=mode)


def test_what_leaves_nothing_out_is_taken() -> None:
    session: Any = Session()
    taken = (("startFrom", "snapshot"), ("onNewTable", "fail"), ("onNewTable", "snapshot"), ("onTruncate", "fail"))
    for name, value in taken:
        with pytest.raises(Begun):
            mirror(session, **{**GIVEN, name: value}, tables="public.*")


@pytest.mark.parametrize(("tables", "table"), [
    ("public.*", "sales.orders"), ("public.orders", "public.oders"), ("public.orders, sales.*", "public.items"),
])  # fmt: skip
def test_a_mode_is_that_of_a_table_that_the_mirror_may_have(tables: str, table: str) -> None:
    session: Any = Session()
    with pytest.raises(OptionError, match=f"mode or asString names {table}, and the option tables"):
        mirror(session, **GIVEN, tables=tables, mode={table: "history"})
    with pytest.raises(OptionError, match=f"mode or asString names {table}, and the option tables"):
        mirror(session, **GIVEN, tables=tables, asString=[f"{table}.c"])
    with pytest.raises(Begun):
        mirror(session, **GIVEN, tables=f"{tables}, {table}", mode={table: "history"})


def test_messages_have_no_place_in_a_lake() -> None:
    session: Any = Session()
    with pytest.raises(OptionError, match="messagePrefixes is not used in a mirror"):
        mirror(session, **GIVEN, tables="public.*", messagePrefixes="outbox")


def test_a_target_that_delta_rs_cannot_have_is_refused() -> None:
    session: Any = Session()
    with pytest.raises(OptionError, match="has #, which no path"):
        mirror(session, **{**GIVEN, "format": "deltalake", "target": "s3://lake/te#am/{table}"}, tables="public.*")


def test_a_ledger_that_is_a_name_needs_the_format_of_its_mirror() -> None:
    session: Any = Session()
    with pytest.raises(OptionError, match=r"the ledger 'lake\.shop\._pgcdc' is not a path\n.*format='iceberg'"):
        mirror_at(session, "lake.shop._pgcdc")


@pytest.mark.parametrize(("interval", "once", "what"), [
    ("often", False, "interval: 'often' is not a time"), ("2d", False, "interval: 2d is out of bounds"),
    (-1, False, "interval: '-1' is not a time"), ("30s", True, "interval is of no use with once"),
])  # fmt: skip
def test_an_interval_is_a_time_between_batches(interval: str | int, once: bool, what: str) -> None:
    session: Any = Session()
    with pytest.raises(OptionError, match=what):
        mirror(session, **GIVEN, tables="public.*", interval=interval, once=once)
    for taken in ("30s", 30, 0):
        with pytest.raises(Begun):
            mirror(session, **GIVEN, tables="public.*", interval=taken, once=taken == 0)
