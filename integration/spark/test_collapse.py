"""What ``collapse`` leaves of a batch brings a sink to where all changes, one by one, have brought the table."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from pg_cdc_source import collapse
from pg_cdc_source.errors import OptionError

# Names that SQL would trip over: many tables in one, so that one Spark job tries many histories.
CASE, ID, NUMBER, TEXT, OCTETS = "Case.no", "i`d", "number", "t ext", "öctets"
VALUES = (NUMBER, TEXT, OCTETS)
TOASTED = (TEXT, OCTETS)
TABLE = [
    StructField(CASE, IntegerType()),
    StructField(ID, StringType()),
    StructField(NUMBER, IntegerType()),
    StructField(TEXT, StringType()),
    StructField(OCTETS, BinaryType()),
]
CHANGE = [
    StructField("_change_type", StringType()),
    StructField("_commit_lsn", LongType()),
    StructField("_seq", LongType()),
    StructField("_commit_ts", TimestampType()),
    StructField("_xid", LongType()),
    StructField("_unchanged", ArrayType(StringType())),
]
BEFORE = StructField("_before", StructType(TABLE))

Key = tuple[int, str]
Values = dict[str, Any]
Row = dict[str, Any]


def frame(spark: SparkSession, rows: Iterable[Row], *, before: bool = False) -> DataFrame:
    schema = StructType([*TABLE, *CHANGE, *([BEFORE] if before else [])])
    return spark.createDataFrame([tuple(row.get(name) for name in schema.names) for row in rows], schema)


def change(
    kind: str,
    lsn: int,
    seq: int,
    key: Key | None = None,
    values: Values | None = None,
    unchanged: Sequence[str] = (),
    before: tuple[Key, Values] | None = None,
) -> Row:
    """One row of the stream; what is unchanged did not travel."""
    row: Row = {name: value for name, value in (values or {}).items() if name not in unchanged}
    row.update({"_change_type": kind, "_commit_lsn": lsn, "_seq": seq, "_unchanged": list(unchanged)})
    if key is not None:
        row.update({CASE: key[0], ID: key[1]})
    if kind != "snapshot":
        row.update({"_xid": lsn, "_commit_ts": datetime.fromtimestamp(lsn, timezone.utc)})
    if before is not None:
        (row_case, row_id), old = before
        row["_before"] = tuple({CASE: row_case, ID: row_id, **old}[field.name] for field in TABLE)
    return row


# --- the oracle ------------------------------------------------------------------------------------------------------


@dataclass
class Alive:
    """A row of the table, how it began in the batch, and where each of its values was seen last.

    ``sink``: before the batch, under this key; ``own`` and ``snapshot``: in a row of this key; ``former``: in a row
    of the key that it had before; ``lost``: nowhere that can be told from the batch.
    """

    values: Values
    began: str
    seen: dict[str, str]


@dataclass
class History:
    """A table that changes at random, and the rows that the stream has of it."""

    chance: random.Random
    full_identity: bool
    rows: list[Row] = field(default_factory=list)
    alive: dict[Key, Alive] = field(default_factory=dict)
    sink: dict[Key, Values] = field(default_factory=dict)
    touched: set[Key] = field(default_factory=set)
    truncated: bool = False
    lsn: int = 100
    seq: int = 0

    @classmethod
    def of(cls, seed: int, *, cases: int, commits: int, truncates: int, full_identity: bool) -> History:
        history = cls(random.Random(seed), full_identity)
        for case in range(cases):
            history.begin(case)
        cuts = set(history.chance.sample(range(commits), truncates))
        for commit in range(commits):
            history.lsn += history.chance.randint(1, 50)
            history.seq = 0
            for _ in range(history.chance.choice((1, 1, 2, 7))):
                history.step(history.chance.randrange(cases))
            if commit in cuts:
                history.truncate()
        history.chance.shuffle(history.rows)
        return history

    def fresh(self) -> Values:
        text = self.chance.choice((None, "", f"text {self.chance.random()}"))
        return {
            NUMBER: self.chance.randrange(99),
            TEXT: text,
            OCTETS: self.chance.choice((None, self.chance.randbytes(3))),
        }

    def begin(self, case: int) -> None:
        """Rows of before the batch: in the sink, or in the snapshot that is in the batch as well."""
        snapshot = self.chance.random() < 0.3
        for name in self.chance.sample("abcd", self.chance.randint(0, 3)):
            key, values = (case, name), self.fresh()
            if snapshot:
                self.rows.append(change("snapshot", 99, 0, key, values))
                self.touched.add(key)
            else:
                self.sink[key] = values
            origin = "snapshot" if snapshot else "sink"
            self.alive[key] = Alive(dict(values), origin, dict.fromkeys(VALUES, origin))

    def step(self, case: int) -> None:
        keys = [(case, name) for name in "abcd"]
        there = [key for key in keys if key in self.alive]
        free = [key for key in keys if key not in self.alive]
        kind = self.chance.choice(("insert", "update", "update", "move", "delete"))
        if kind == "insert" and free:
            self.insert(self.chance.choice(free))
        elif kind == "update" and there:
            self.update(self.chance.choice(there))
        elif kind == "move" and there and free:
            self.move(self.chance.choice(there), self.chance.choice(free))
        elif kind == "delete" and there:
            self.delete(self.chance.choice(there))

    def next(self) -> int:
        self.seq += self.chance.choice((1, 1, 2))
        return self.seq

    def emit(self, kind: str, key: Key, *args: Any, **more: Any) -> None:
        self.rows.append(change(kind, self.lsn, self.seq, key, *args, **more))
        self.touched.add(key)

    def insert(self, key: Key) -> None:
        self.next()
        values = self.fresh()
        self.alive[key] = Alive(values, "insert", dict.fromkeys(VALUES, "own"))
        self.emit("insert", key, values)

    def delete(self, key: Key) -> None:
        self.next()
        old = self.alive.pop(key).values
        self.emit("delete", key, old if self.full_identity else {}, before=self.old_image(key, old))

    def old_image(self, key: Key, old: Values) -> tuple[Key, Values]:
        return key, old if self.full_identity else dict.fromkeys(VALUES)

    def new_values(self, row: Alive) -> list[str]:
        """Change some values; return the columns whose value does not travel."""
        fresh = self.fresh()
        for name in self.chance.sample(VALUES, self.chance.randint(0, 2)):
            row.values[name] = fresh[name]
            row.seen[name] = "own"
        # Also what did not change travels where it is not TOASTed.
        listed = [name for name in TOASTED if row.values[name] != fresh[name] and self.chance.random() < 0.7]
        for name in VALUES:
            if name not in listed:
                row.seen[name] = "own"
        return listed

    def update(self, key: Key) -> None:
        self.next()
        row, old = self.alive[key], dict(self.alive[key].values)
        listed = self.new_values(row)
        self.emit("update", key, row.values, listed, before=(key, old) if self.full_identity else None)

    def move(self, old_key: Key, key: Key) -> None:
        row = self.alive.pop(old_key)
        old = dict(row.values)
        seen = {name: "former" if origin == "own" else "lost" for name, origin in row.seen.items()}
        row = Alive(row.values, "insert", seen)
        listed = self.new_values(row)
        self.alive[key] = row
        self.next()
        if self.full_identity:
            # Without a primary key: one update, and only its old image has the old key.
            self.emit("update", key, row.values, listed, before=(old_key, old))
            self.touched.add(old_key)
        else:
            self.emit("delete", old_key, before=self.old_image(old_key, old))
            self.seq += 1
            self.emit("insert", key, row.values, listed)

    def truncate(self) -> None:
        self.next()
        self.rows.append(change("truncate", self.lsn, self.seq))
        self.alive.clear()
        self.touched.clear()
        self.truncated = True

    def expected(self) -> dict[Key, tuple[str, frozenset[str], Values]]:
        """What is left for each key: what to do, what did not travel, and the values that did."""
        result: dict[Key, tuple[str, frozenset[str], Values]] = {}
        for key in self.touched:
            row = self.alive.get(key)
            if row is None:
                result[key] = ("delete", frozenset(), {})
                continue
            listed = frozenset(name for name, origin in row.seen.items() if origin in ("sink", "lost"))
            began = "update" if row.began == "sink" else row.began
            result[key] = (began, listed, {name: row.values[name] for name in VALUES if name not in listed})
        return result


def plain(row: Row) -> Values:
    return {name: bytes(row[name]) if isinstance(row[name], bytearray) else row[name] for name in VALUES}


def apply(sink: dict[Key, Values], rows: Sequence[Row]) -> None:
    """Do what ``_change_type`` says, as the documentation of ``collapse`` has it."""
    if any(row["_change_type"] == "truncate" for row in rows):
        sink.clear()
    for row in rows:
        key = (row[CASE], row[ID])
        if row["_change_type"] == "delete":
            sink.pop(key, None)
        elif row["_change_type"] != "truncate":
            kept = sink.get(key, {}) if row["_change_type"] == "update" else {}
            sink[key] = {
                name: kept[name] if name in row["_unchanged"] and name in kept else value
                for name, value in plain(row).items()
            }


def collected(df: DataFrame) -> list[Row]:
    return [row.asDict() for row in df.collect()]


@pytest.mark.parametrize(
    ("truncates", "full_identity"),
    [
        pytest.param(0, False, id="0-default identity", marks=pytest.mark.corner),
        pytest.param(1, False, id="1-default identity"),
        pytest.param(3, False, id="3-default identity"),
        pytest.param(0, True, id="0-full identity, no primary key"),
        pytest.param(1, True, id="1-full identity, no primary key"),
        pytest.param(3, True, id="3-full identity, no primary key", marks=pytest.mark.corner),
    ],
)
def test_a_sink_comes_to_where_every_change_has_brought_the_table(
    truncates: int, full_identity: bool, spark: SparkSession
) -> None:
    history = History.of(truncates + 1, cases=400, commits=900, truncates=truncates, full_identity=full_identity)
    kinds = {row["_change_type"] for row in history.rows}
    assert kinds >= {"snapshot", "insert", "update", "delete"}
    df = frame(spark, history.rows, before=full_identity)
    result = collapse(df, [CASE, ID])
    assert result.schema == df.schema
    rows = collected(result)
    assert sum(row["_change_type"] == "truncate" for row in rows) == min(truncates, 1)
    expected = history.expected()
    keyed = {(row[CASE], row[ID]): row for row in rows if row["_change_type"] != "truncate"}
    assert len(keyed) == len(rows) - min(truncates, 1)
    assert keyed.keys() == expected.keys()
    for key, (kind, listed, values) in expected.items():
        row = keyed[key]
        assert (row["_change_type"], sorted(row["_unchanged"])) == (kind, sorted(listed)), key
        if kind != "delete":
            assert plain(row) == {name: values.get(name) for name in VALUES}, key

    sink = {key: dict(values) for key, values in history.sink.items()}
    apply(sink, rows)
    assert sink.keys() == history.alive.keys()
    lost = 0
    for key, alive in history.alive.items():
        known = {name: value for name, value in alive.values.items() if alive.seen[name] != "lost"}
        lost += len(VALUES) - len(known)
        assert {name: sink[key][name] for name in known} == known, key
    # Such values are what the documentation warns of; they must be few, or this test shows nothing.
    assert lost < len(history.alive)


# --- rules, one by one -----------------------------------------------------------------------------------------------

FIRST, SECOND = (1, "a"), (1, "b")
FULL = {NUMBER: 1, TEXT: "long", OCTETS: b"octets"}


def rows_of(spark: SparkSession, *rows: Row, before: bool = False) -> dict[Any, Row]:
    """The collapsed rows by their key, None for the truncate."""
    return {row[ID]: row for row in collected(collapse(frame(spark, rows, before=before), [CASE, ID]))}


def test_a_value_is_not_carried_over_a_delete_or_from_an_unrelated_one(spark: SparkSession) -> None:
    third = (1, "c")
    result = rows_of(
        spark,
        change("insert", 1, 1, FIRST, FULL),
        change("delete", 2, 1, FIRST),
        change("update", 3, 1, FIRST, FULL, [TEXT]),
        # The delete that this insert belongs to would be number 4 of the same commit.
        change("insert", 4, 1, third, FULL),
        change("delete", 5, 3, third),
        change("insert", 5, 5, SECOND, FULL, [TEXT]),
        change("delete", 6, 4, (2, "d")),
    )
    assert {key: (row["_change_type"], row[TEXT], row["_unchanged"]) for key, row in result.items()} == {
        "a": ("update", None, [TEXT]),
        "b": ("insert", None, [TEXT]),
        "c": ("delete", None, []),
        "d": ("delete", None, []),
    }


def test_values_follow_a_changed_key_and_later_updates_keep_them(spark: SparkSession) -> None:
    result = rows_of(
        spark,
        change("insert", 1, 1, FIRST, FULL),
        change("delete", 2, 7, FIRST),
        change("insert", 2, 8, SECOND, {NUMBER: 2}, [TEXT, OCTETS]),
        change("update", 3, 1, SECOND, {NUMBER: 3, OCTETS: None}, [TEXT]),
    )
    assert result["a"]["_change_type"] == "delete"
    assert (result["b"]["_change_type"], result["b"]["_unchanged"]) == ("insert", [])
    assert plain(result["b"]) == {NUMBER: 3, TEXT: "long", OCTETS: None}
    assert (result["b"]["_commit_lsn"], result["b"]["_seq"]) == (3, 1)


def test_an_update_after_a_truncate_takes_nothing_from_before_it(spark: SparkSession) -> None:
    result = rows_of(
        spark,
        change("snapshot", 0, 0, FIRST, FULL),
        change("insert", 1, 1, SECOND, FULL),
        change("truncate", 1, 2),
        change("truncate", 1, 3),
        change("update", 1, 4, SECOND, FULL, [TEXT]),
    )
    assert result.keys() == {None, "b"}
    assert (result[None]["_change_type"], result[None]["_seq"]) == ("truncate", 3)
    assert (result["b"]["_change_type"], result["b"][TEXT], result["b"]["_unchanged"]) == ("update", None, [TEXT])


def test_a_key_that_only_the_old_image_shows_becomes_a_delete(spark: SparkSession) -> None:
    old = {NUMBER: 1, TEXT: "old", OCTETS: b"old"}
    row = change("update", 9, 4, SECOND, FULL, before=(FIRST, old))
    result = rows_of(spark, row, before=True)
    gone, moved = result["a"], result["b"]
    assert (gone["_change_type"], gone["_commit_lsn"], gone["_seq"]) == ("delete", 9, 4)
    assert (plain(gone), gone["_unchanged"], gone["_before"].asDict()[ID]) == (old, [], "a")
    assert (moved["_change_type"], plain(moved), moved["_before"]) == ("insert", FULL, None)


def test_the_same_rows_twice_are_the_rows_once(spark: SparkSession) -> None:
    rows = [
        change("snapshot", 0, 0, FIRST, FULL),
        change("update", 1, 1, FIRST, {NUMBER: 2}, [TEXT, OCTETS]),
        change("delete", 2, 1, FIRST),
        change("insert", 2, 2, SECOND, {NUMBER: 3, TEXT: "t"}, [OCTETS]),
        change("truncate", -1, 1),
    ]
    assert sorted(map(repr, rows_of(spark, *rows, *rows).values())) == sorted(map(repr, rows_of(spark, *rows).values()))


def test_rows_that_say_what_the_columns_are_are_left_out(spark: SparkSession) -> None:
    rows = [change("schema", 1, 1), change("insert", 1, 1, (1, "a"), {NUMBER: 5})]
    (row,) = collapse(frame(spark, rows), [CASE, ID]).collect()
    assert (row["_change_type"], row[NUMBER]) == ("insert", 5)


@pytest.mark.corner
def test_an_empty_batch_has_no_rows(spark: SparkSession) -> None:
    assert rows_of(spark) == {}
    assert rows_of(spark, before=True) == {}


@pytest.mark.corner
def test_names_nullability_types_and_metadata_stay(spark: SparkSession) -> None:
    df = frame(spark, [change("insert", 1, 1, FIRST, FULL)]).select(
        F.col(f"`{CASE}`").alias(CASE, metadata={"comment": "a key"}),
        F.col("`i``d`"),
        F.create_map(F.lit("m"), F.lit(1)).alias("A.map"),
        F.lit(7).alias("never null"),
        F.col(f"`{TEXT}`").alias(TEXT, metadata={"comment": "a value"}),
        "_change_type",
        "_commit_lsn",
        "_seq",
        F.array(F.lit("x")).alias("_unchanged"),
    )
    result = collapse(df, [CASE.upper(), ID.upper()])
    assert result.schema == df.schema
    assert [field.metadata for field in result.schema] == [field.metadata for field in df.schema]
    assert [tuple(row) for row in result.collect()] == [tuple(row) for row in df.collect()]


def test_one_key_may_be_given_as_it_is(spark: SparkSession) -> None:
    df = frame(spark, [change("insert", 1, 1, FIRST, FULL), change("insert", 2, 1, SECOND, FULL)])
    assert [row["_commit_lsn"] for row in collapse(df, CASE).collect()] == [2]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ([], "has no key"),
        ([CASE, "cAse.NO"], "a key twice"),
        (["numbr"], "did you mean number?"),
        (["_seq"], "no such column"),
    ],
)
def test_keys_that_are_none_are_refused(keys: list[str], expected: str, spark: SparkSession) -> None:
    with pytest.raises(OptionError) as caught:
        collapse(frame(spark, []), keys)
    assert expected in str(caught.value)
    assert "Remedy: " in str(caught.value)


def test_what_is_no_batch_of_typed_rows_is_refused(spark: SparkSession) -> None:
    df = frame(spark, [])
    with pytest.raises(OptionError, match="no column _seq, _unchanged"):
        collapse(df.drop("_seq", "_unchanged"), [CASE])
    with pytest.raises(OptionError, match="project"):
        collapse(df.withColumns({"_table": F.lit("t"), "after": F.lit("{}")}), [CASE])
    with pytest.raises(OptionError, match="foreachBatch"):
        collapse(spark.readStream.format("rate").load(), ["value"])
    with pytest.raises(OptionError, match="_before does not have"):
        collapse(frame(spark, [], before=True).withColumn("derived", F.lit(1)), ["derived"])


@pytest.mark.parametrize("kind", [pytest.param("insert", marks=pytest.mark.corner), "delete", "snapshot"])
def test_a_null_key_fails_the_action(kind: str, spark: SparkSession) -> None:
    rows = [change(kind, 77, 5, (1, None), FULL), change("insert", 1, 1, FIRST, FULL)]  # type: ignore[arg-type]
    with pytest.raises(PySparkException) as caught:
        collapse(frame(spark, rows), [CASE, ID]).collect()
    assert '("Case.no", "i`d") is NULL in the row with _commit_lsn 77, _seq 5' in str(caught.value)


def test_an_old_key_that_is_null_fails_the_action(spark: SparkSession) -> None:
    row = change("update", 9, 4, SECOND, FULL, before=((1, None), FULL))  # type: ignore[arg-type]
    with pytest.raises(PySparkException, match="is NULL in the row with _commit_lsn 9, _seq 4"):
        collapse(frame(spark, [row], before=True), [CASE, ID]).collect()


def test_rows_that_the_keys_do_not_tell_apart_fail_the_action(spark: SparkSession) -> None:
    rows = [change("snapshot", 3, 0, FIRST, FULL), change("snapshot", 3, 0, SECOND, FULL)]
    assert len(collapse(frame(spark, rows), [CASE, ID]).collect()) == 2
    with pytest.raises(PySparkException, match="two rows have the same key"):
        collapse(frame(spark, rows), [CASE]).collect()


@pytest.mark.corner
def test_it_is_called_in_foreach_batch(spark: SparkSession) -> None:
    seen: list[list[tuple[int, str]]] = []

    def sink(batch: DataFrame, _: int) -> None:
        rows = collapse(batch, "key").select("key", "_change_type").orderBy("key")
        seen.append([tuple(row) for row in rows.collect()])

    stream = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 12).load()
    changes = stream.select(
        (F.col("value") % 3).alias("key"),
        F.when(F.col("value") % 12 == 11, "delete").otherwise("update").alias("_change_type"),
        F.lit(1).cast("long").alias("_commit_lsn"),
        F.col("value").alias("_seq"),
        F.array().cast("array<string>").alias("_unchanged"),
    )
    query = changes.writeStream.foreachBatch(sink).trigger(availableNow=True).start()
    assert query.awaitTermination(120)
    assert seen
    assert all(batch == [(0, "update"), (1, "update"), (2, "delete")] for batch in seen)


@pytest.mark.corner
def test_old_values_of_columns_that_differ_by_case_alone(spark: SparkSession) -> None:
    table = [StructField("id", IntegerType()), StructField("a", StringType()), StructField("A", StringType())]
    schema = StructType([*table, *CHANGE, StructField("_before", StructType(table))])
    moved: tuple[Any, ...] = (2, "x", "Y", "update", 100, 1, None, 100, [], (1, "x", "y"))
    left = collapse(spark.createDataFrame([moved], schema), ["id"]).toArrow().to_pylist()
    assert sorted((row["id"], row["_change_type"]) for row in left) == [(1, "delete"), (2, "insert")]
    (inserted,) = [row for row in left if row["_change_type"] == "insert"]
    assert (inserted["a"], inserted["A"]) == ("x", "Y")
