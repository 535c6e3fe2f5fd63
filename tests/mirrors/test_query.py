"""Which options a mirror does not take."""

from __future__ import annotations

from typing import Any

import pytest

from pg_cdc_source.errors import OptionError
from pg_cdc_source.mirrors.query import mirror

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
