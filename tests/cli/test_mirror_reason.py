"""What the command says of a query that failed."""

from __future__ import annotations

import pytest

from pg_cdc_source.cli.mirror import _reason

SAYS = "[CONNECT] cannot connect to PostgreSQL at db\n  Remedy: check the host name"
SPARKS = """[STREAM_FAILED] Query terminated: Traceback (most recent call last):
  File "/site-packages/pg_cdc_source/spark/edge.py", line 28, in short_errors
    raise copy.copy(error) from None
{}: {}
 SQLSTATE: 38000
=== Streaming Query ==="""


@pytest.mark.parametrize(
    "name", ["pg_cdc_source.errors.ConnectError", "pg_cdc_source.stream.layouts.schema_history.NewTableError"]
)
def test_it_is_our_own_error_whatever_class_it_has(name: str) -> None:
    assert _reason(SPARKS.format(name, SAYS)) == SAYS


def test_where_there_is_none_it_is_all_that_spark_says() -> None:
    assert _reason("[OTHER] no space left") == "[OTHER] no space left"
