"""Tables that Spark's own SQL writes: what breaks between their statements, and whoever rewrites files meanwhile."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import lake_jars
import pytest
from driving import run
from lake import Begin, rows_of
from psycopg2.extensions import connection as Session
from pyspark.sql import SparkSession
from watch import wait_until


@pytest.fixture(scope="module", params=[
    pytest.param(name, marks=pytest.mark.skipif(why is not None, reason=why or ""))
    for name in ("delta", "iceberg") for why in [lake_jars.lacking(name)]
])  # fmt: skip
def format(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class _Killed(BaseException):
    """Ends a batch as a killed process does."""


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        (("DROP b", "RENAME a TO b", "ADD a int DEFAULT 5"), ["DROP", "SET", "RENAME", "SET", "ADD", "UPDATE", "SET"]),
        (("RENAME a TO b", "ADD a int DEFAULT 5", "ADD n int"), ["RENAME", "SET", "ADD", "UPDATE", "SET"]),
        (("DROP a", "ALTER d TYPE numeric(12, 2)", "RENAME d TO a"), ["DROP", "SET", "RENAME", "SET", "ALTER", "SET"]),
        (("DROP a", "DROP b"), ["DROP", "SET"]),
    ],
    ids=["all", "without a drop", "a type", "drops"],
)
def test_columns_go_on_changing_where_a_crash_has_ended_it(
    changes: Sequence[str], kinds: Sequence[str], pg: Session, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = begin("CREATE TABLE t (id int PRIMARY KEY, a int, d numeric(10, 2))",
                 *(["ALTER TABLE t ADD b int"] if "DROP b" in changes else []),
                 "INSERT INTO t VALUES (1, 10, 1.5), (2, 20, 2.5)")  # fmt: skip
    done: list[str] = []
    whole = SparkSession.sql

    def breaking(self: SparkSession, statement: str, *args: Any, **named: Any) -> Any:
        found = whole(self, statement, *args, **named)
        if re.match(r"ALTER TABLE|UPDATE ", statement):
            is_again = done[-1:] == [statement]
            done.append(statement)
            if not is_again:
                raise _Killed
        return found

    monkeypatch.setattr(SparkSession, "sql", breaking)
    run(pg, *(f"ALTER TABLE t {change}" for change in changes), "INSERT INTO t (id) VALUES (3)")

    def step() -> bool:
        try:
            lake.step()
        except _Killed:
            lake.restart()
        return lake.rows("t") == rows_of(pg, "t")

    wait_until(step)
    last = lake.ledger.last()
    assert last is not None
    assert last.set_aside == {}
    found = [re.sub(r"ALTER TABLE \S+ ", "", statement).split()[0] for statement in done]
    # What changes nothing where it is done twice may be done so.
    assert [kind for i, kind in enumerate(found) if kind not in ("ALTER", "UPDATE") or kind != found[i - 1]] == kinds
