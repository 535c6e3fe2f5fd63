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
        return {NUMBER: self.chance.randrange(99), TEXT: text, OCTETS: self.chance.choice((None, self.chance.randbytes(3)))}

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


@pytest.mark.parametrize("full_identity", [False, True], ids=["default identity", "full identity, no primary key"])
@pytest.mark.parametrize("truncates", [0, 1, 3])
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
    for key, row in history.alive.items():
        known = {name: value for name, value in row.values.items() if row.seen[name] != "lost"}
        lost += len(VALUES) - len(known)
        assert {name: sink[key][name] for name in known} == known, key
    # Such values are what the documentation warns of; they must be few, or this test shows nothing.
    assert lost < len(history.alive)
