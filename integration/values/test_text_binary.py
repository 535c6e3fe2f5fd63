"""Every type's values, once from binary COPY and once from text: identical arrays, and the same values refused."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import pytest
from psycopg2 import sql
from psycopg2.extensions import connection as Session
from type_values import TEXTS, VALUES, array_of, assert_identical, field, literals, printed, sent

from pg_cdc_source.options.conninfo import ConnectionOptions
from pg_cdc_source.options.numeric_as import NumericAs
from pg_cdc_source.postgres.columns import describe_columns
from pg_cdc_source.postgres.connection import connect
from pg_cdc_source.protocol.binary_copy import CopyDecoder
from pg_cdc_source.values.decoder import Decoded
from pg_cdc_source.values.registry import TYPES, plan
from pg_cdc_source.values.wire import Messages

ROWS = 1500
STRING = NumericAs("string")

# --- what is written; {g} is a number that differs from value to value --------------------------------------------


TEXTS += ["x" * 9000, "\\x", "[1:2]={}", "\u00a0", "\\N"]


def fill(pg: Session, kinds: Sequence[str]) -> None:
    """Make the table ``t`` with a column for each kind and one for its arrays: literals first, random values then."""
    columns = [
        (kind + suffix, *(array_of(kind) if suffix else VALUES[kind])) for kind in kinds for suffix in ("", "[]")
    ]
    selected = [
        f"CASE WHEN g <= {len(edges)} THEN {literals(edges)}[g]::{declared}"
        f" WHEN g % 13 > 0 THEN ({random.replace('{g}', 'g')})::{declared} END"
        for declared, random, edges in columns
    ]
    with pg.cursor() as cursor:
        cursor.execute("SELECT setseed(0.42)")
        cursor.execute(f"CREATE TABLE t ({', '.join(f'c{i} {column[0]}' for i, column in enumerate(columns))})")
        cursor.execute(f"INSERT INTO t SELECT {', '.join(selected)} FROM generate_series(1, {ROWS}) AS g")


# --- what is read -----------------------------------------------------------------------------------------------


def refused(decoded: Decoded) -> dict[int, set[str]]:
    reasons: dict[int, set[str]] = {}
    for refusal in decoded.refused:
        for row in refusal.rows:
            reasons.setdefault(int(row), set()).add(refusal.reason)
    return reasons


GROUPS = {
    "integers and bits": ["bool", "bytea", "int8", "int2", "int4", "oid", "uuid"],
    "floats": ["float4", "float8"],
    "texts": ["name", "text", "bpchar", "bpchar(10)", "varchar", "json", "jsonb"],
    "moments": ["date", "timestamp", "timestamptz"],
    "numerics": [kind for kind in VALUES if kind.startswith("numeric")],
    "bits": ["bit(1)", "bit(9)", "varbit"],
    "others": ["interval", "inet", "money", "time", "timetz", "int4range", "box"],
}


@pytest.mark.parametrize("group", GROUPS)
def test_text_and_binary_give_identical_arrays(group: str, db: str, pg: Session) -> None:
    fill(pg, GROUPS[group])
    read: set[tuple[str, str]] = set()
    with closing(connect(ConnectionOptions(db), "test")) as session:
        for column in describe_columns(session, sql.SQL("SELECT * FROM public.t"), "test"):
            texts = printed(session, column)
            ways = [plan(column, as_string=as_string, numeric_as=STRING) for as_string in (False, True)]
            if column.type_name in ("numeric", "numeric[]"):
                more = (NumericAs("double"), NumericAs("decimal", 20, 4), NumericAs("decimal", 38, 9))
                ways += [plan(column, as_string=False, numeric_as=numeric_as) for numeric_as in more]
            for codec in ways:
                rows = sent(session, codec)
                assert len(rows) == len(texts) == ROWS
                from_binary = codec.decode(field([None if row[2:6] == b"\xff" * 4 else row[6:] for row in rows]))
                from_text = codec.decode_text(field(texts))
                (array,) = CopyDecoder([codec], "null").decode(Messages.joined(rows, 64))
                assert_identical(from_text.array, array)
                assert refused(from_text) == refused(from_binary), column.type_name
                assert from_text.array.null_count < 0.8 * ROWS
                read.add((column.type_name, str(codec.arrow_type)))
    assert len(read) > len(GROUPS[group])


def test_every_type_of_the_table_is_compared(pg: Session) -> None:
    declared = {kind for kinds in GROUPS.values() for kind in kinds}
    assert declared == set(VALUES)
    # Those of extensions are in test_extension_types.
    assert {pg_type.name for pg_type in TYPES if pg_type.oid} <= {name.split("(")[0] for name in declared}


def test_what_is_refused_is_what_was_written_to_be_refused(db: str, pg: Session) -> None:
    """Otherwise both formats might refuse all or nothing, and agree."""
    with pg.cursor() as cursor:
        cursor.execute(
            "CREATE TABLE t AS SELECT unnest('{2024-01-01,infinity,10000-01-01,0001-12-31 BC}'::date[]) AS d"
        )
    with closing(connect(ConnectionOptions(db), "test")) as session:
        (column,) = describe_columns(session, sql.SQL("SELECT * FROM public.t"), "test")
        decoded = plan(column, as_string=False, numeric_as=STRING).decode_text(field(printed(session, column)))
    assert [value is None for value in decoded.array.to_pylist()] == [False, True, True, True]
    assert refused(decoded) == {
        1: {"infinity"},
        2: {"a year outside 1 to 9999"},
        3: {"a year outside 1 to 9999"},
    }
