"""``collapse``: one row for each key, with its final state in a batch.

It is one window over the rows of each key and a second one over pairs of rows. Both are plain expressions, so that it
runs wherever DataFrames do, Spark Connect included.

- Within a key, the last row wins. If it lists a column in ``_unchanged``, the value comes from the last row before it
  that has one. The search goes back to the row's own insert and no further: what a key held before a delete is another
  row.
- An insert that lists columns in ``_unchanged`` got their values from the row whose key changed. The delete right
  before the insert ended that row, and the second window brings the two together. A plain insert has all its values.
- Rows that a TRUNCATE made void are left out first, so that no value can be taken from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F
from pyspark.sql.types import StructField, StructType

from pg_cdc_source.errors import OptionError
from pg_cdc_source.options.names import listed_names, quoted
from pg_cdc_source.options.suggestions import nearest
from pg_cdc_source.protocol.layout import BEFORE
from pg_cdc_source.spark.edge import CHANGE_NAMES, expect_columns


def collapse(df: DataFrame, keys: str | Sequence[str]) -> DataFrame:
    """Return one row for each key of the batch ``df``, with the key's final state; same schema, any order.

    ``df`` holds one table's rows: a typed stream's, or those of :func:`project`, as ``foreachBatch`` hands them over;
    several batches together will do. It is read twice. ``keys`` are the columns that identify a row: those of the
    replica identity, by default the primary key; under FULL the primary key, or other unique columns. ``_change_type``
    says what a sink has to do with a row, in this order:

    ``truncate``
        At most one row, without a key: remove all rows, then apply the others.
    ``delete``
        Remove the key's row, if there is one.
    ``update``
        Replace the key's row, but keep the sink's values of the columns in ``_unchanged``: they did not travel.
    ``insert``, ``snapshot``
        Replace the key's row by this one, or add it.

    So upserting by key is enough, as with Delta::

        def apply(batch, _):
            rows = collapse(batch, ["id"]).persist()
            if not rows.where("_change_type = 'truncate'").isEmpty():
                target.delete()
            kept = (
                "CASE WHEN s._change_type = 'update' AND array_contains(s._unchanged, '{0}') "
                "THEN t.`{0}` ELSE s.`{0}` END"
            )
            (
                target.alias("t")
                .merge(rows.where("_change_type <> 'truncate'").alias("s"), "t.id = s.id")
                .whenMatchedDelete("s._change_type = 'delete'")
                .whenMatchedUpdate(set={name: kept.format(name) for name in columns})
                .whenNotMatchedInsert("s._change_type <> 'delete'", {name: f"s.`{name}`" for name in columns})
                .execute()
            )
            rows.unpersist()

    A value that did not travel is taken from an earlier row of the same key in the batch, and its column is then no
    longer listed. Values that came with a change also follow one change of the key. An ``insert`` that still lists
    columns in ``_unchanged`` had another key before, and only the sink's row of that key has their values: they are
    NULL here, and a merge by key writes NULL. If keys change in a table with TOASTed values, set REPLICA IDENTITY FULL,
    or use :func:`mirror`, which looks for them in the row of the old key.

    A table with equal rows cannot be kept by key. Under REPLICA IDENTITY FULL without a primary key, only ``_before``
    (option ``beforeImage``) shows that an update changed the key; with it, the old key becomes a delete. If a
    DEFERRABLE constraint guards the key, two rows may exchange their keys within a transaction; changes that are
    applied by key, row by row, cannot follow that.

    Raises OptionError. The action fails if a key is NULL, and if two different rows of one key have the same position,
    because ``keys`` then do not identify a row.
    """
    if df.isStreaming:
        raise OptionError(
            "collapse() takes one batch of rows, not a stream",
            remedy="call it in the function that writeStream.foreachBatch() runs",
        )
    expect_columns(df, ("_change_type", "_commit_lsn", "_seq", "_unchanged"), "collapse() takes rows of pgcdc")
    if {"_table", "after"} <= set(df.columns):
        raise OptionError("collapse() takes typed rows of one table, not the envelope", remedy="project() them first")
    # A row that says what the columns are is no row of the table.
    rows = df.where(F.col("_change_type") != "schema")
    batch = _Batch.of(rows, [keys] if isinstance(keys, str) else keys)
    rows = _with_moved_keys(batch)
    found = _Found.of(batch, rows)
    rows = _last_rows(batch, _after_truncate(batch, _with_keys(batch, rows), found), found)
    if found.listed and found.inserts_list:
        rows = _with_values_of_former_key(batch, rows, found)
    return batch.named(rows.where(F.col(_LAST)))


@dataclass(frozen=True, slots=True)
class _Batch:
    """A batch whose columns are named by position, so that any name will do, and the purpose of each column."""

    rows: DataFrame
    fields: tuple[StructField, ...]
    keys: tuple[int, ...]
    values: tuple[int, ...]
    before: int | None

    @classmethod
    def of(cls, df: DataFrame, keys: Sequence[str]) -> _Batch:
        fields = tuple(df.schema.fields)
        names = [field.name for field in fields]
        found = _find_keys(keys, names)
        for i in found:
            if "map<" in fields[i].dataType.simpleString():
                raise OptionError(
                    f"collapse() has the key {quoted(names[i])}, and Spark cannot compare maps",
                    remedy=f"read it with asString={quoted(names[i])}",
                )
        values = tuple(i for i, name in enumerate(names) if name not in (*CHANGE_NAMES, BEFORE) and i not in found)
        before = names.index(BEFORE) if BEFORE in names else None
        return cls(df.toDF(*(f"c{i}" for i in range(len(names)))), fields, found, values, before)

    def index(self, name: str) -> int:
        return [field.name for field in self.fields].index(name)

    def __getitem__(self, name: str) -> Column:
        """One of the change columns."""
        return _column(self.index(name))

    @property
    def key_columns(self) -> list[Column]:
        return [_column(i) for i in self.keys]

    @property
    def key_names(self) -> str:
        return listed_names(self.fields[i].name for i in self.keys)

    @property
    def hashable(self) -> list[Column]:
        """The table's columns that Spark can hash."""
        texts = {i: self.fields[i].dataType.simpleString() for i in sorted(self.keys + self.values)}
        return [_column(i) for i, text in texts.items() if "map<" not in text and "variant" not in text]

    def columns(self, changed: Mapping[int, Column]) -> list[Column]:
        """All columns by position; those in ``changed`` have new values and keep their types."""
        return [self._one(i, changed.get(i)) for i in range(len(self.fields))]

    def _one(self, index: int, changed: Column | None) -> Column:
        if changed is None:
            return _column(index)
        field = self.fields[index]
        changed = changed.cast(field.dataType)
        return (changed if field.nullable else F.coalesce(changed, _column(index))).alias(f"c{index}")

    def named(self, rows: DataFrame) -> DataFrame:
        """Give the columns their names back."""
        return rows.select(
            *(_column(i).alias(field.name, metadata=field.metadata) for i, field in enumerate(self.fields))
        )


def _column(index: int) -> Column:
    return F.col(f"c{index}")


def _find_keys(keys: Sequence[str], names: Sequence[str]) -> tuple[int, ...]:
    known = frozenset(names) - {*CHANGE_NAMES, BEFORE}
    found = []
    for key in keys:
        # Spark ignores case; if two names differ by case only, the key has to match exactly.
        near = [name for name in names if name in known and name.lower() == key.lower()]
        chosen = [key] if key in near else near
        if len(chosen) != 1:
            guess = nearest(key, known)
            what = "several columns of that name" if chosen else "no such column"
            raise OptionError(
                f"collapse() has the key {quoted(key)}, and the rows have {what}",
                remedy=f"did you mean {guess}?"
                if guess and not chosen
                else f"the columns are {', '.join(sorted(known))}",
            )
        found.append(names.index(chosen[0]))
    if not found or len(set(found)) < len(found):
        raise OptionError(
            "collapse() has no key" if not found else "collapse() has a key twice",
            remedy="name the columns of the table's primary key",
        )
    return tuple(found)


# Brings the two halves of a changed key together: a delete has its own number here, an insert the one before its own.
_PAIR = "pair"


def _with_moved_keys(batch: _Batch) -> DataFrame:
    """Split each update that changed the key, as ``_before`` shows, into a delete of the old key and an insert."""
    kind, seq = batch["_change_type"], batch["_seq"]
    rows = batch.rows.withColumn(_PAIR, F.when(kind == "insert", seq - 1).otherwise(seq))
    if batch.before is None:
        return rows
    old, before = _old_values(batch), _column(batch.before)
    same = reduce(Column.__and__, (old[i].eqNullSafe(_column(i)) for i in batch.keys))
    moved = (kind == "update") & before.isNotNull() & ~same
    halves = F.when(moved, F.array(F.lit("delete"), F.lit("insert"))).otherwise(F.array(kind))
    rows = rows.withColumn("moved", moved).withColumn("half", F.explode(halves))
    gone = F.col("moved") & (F.col("half") == "delete")
    changed = {
        **{i: F.when(gone, old[i]).otherwise(_column(i)) for i in (*batch.keys, *batch.values)},
        batch.index("_change_type"): F.col("half"),
        batch.index("_unchanged"): F.when(gone, F.slice(batch["_unchanged"], 1, 0)).otherwise(batch["_unchanged"]),
        # The old image is the old key's, so only the delete keeps it.
        batch.before: F.when(~F.col("moved") | gone, before),
    }
    # Both halves have the update's number.
    pair = F.when(F.col("moved"), seq).otherwise(F.col(_PAIR))
    return rows.select(*batch.columns(changed), pair.alias(_PAIR))


def _old_values(batch: _Batch) -> dict[int, Column]:
    """Each key and value as ``_before`` has it; null if it lacks the value."""
    assert batch.before is not None
    struct_type = batch.fields[batch.before].dataType
    fields = struct_type.fields if isinstance(struct_type, StructType) else []
    there = {field.name: (place, field.dataType) for place, field in enumerate(fields)}
    # By position: Spark does not tell two fields apart whose names differ by case alone.
    numbered = StructType([StructField(f"f{place}", field.dataType) for place, field in enumerate(fields)])
    before = _column(batch.before).cast(numbered)
    old = {}
    for i in (*batch.keys, *batch.values):
        field = batch.fields[i]
        place, kind = there.get(field.name, (0, None))
        same_type = kind == field.dataType
        if i in batch.keys and not same_type:
            raise OptionError(
                f"collapse() has the key {quoted(field.name)}, which {BEFORE} does not have as a column of "
                "the same type",
                remedy=f"drop {BEFORE} before, if updates never change the key; or name columns of the table",
            )
        value = before.getField(f"f{place}") if same_type else F.lit(None)
        old[i] = value.cast(field.dataType)
    return old


def _with_keys(batch: _Batch, rows: DataFrame) -> DataFrame:
    """Make the action fail at a row without a key."""
    no_key = reduce(Column.__or__, (column.isNull() for column in batch.key_columns))
    return _failing(
        rows,
        (batch["_change_type"] != "truncate") & no_key,
        f"collapse(): a key ({batch.key_names}) is NULL",
        batch,
        "name columns of the primary key or the replica identity, which deletes have too",
    )


def _failing(rows: DataFrame, condition: Column, what: str, batch: _Batch, remedy: str) -> DataFrame:
    text = F.concat(
        *(F.lit(f"{what} in the row with _commit_lsn "), batch["_commit_lsn"].cast("string")),
        *(F.lit(", _seq "), batch["_seq"].cast("string"), F.lit(f"\n  Remedy: {remedy}")),
    )
    return rows.where(F.when(condition, F.raise_error(text).cast("boolean")).otherwise(F.lit(True)))


@dataclass(frozen=True, slots=True)
class _Found:
    """What a first pass over the batch finds. Mostly there is nothing to leave out and nothing to carry forward."""

    truncated_at: tuple[int, int] | None  # _commit_lsn and _seq of the last TRUNCATE
    listed: tuple[int, ...]  # the columns that any row lists in _unchanged
    inserts_list: bool

    @classmethod
    def of(cls, batch: _Batch, rows: DataFrame) -> _Found:
        kind, names = batch["_change_type"], batch["_unchanged"]
        truncate = F.when(kind == "truncate", F.struct(batch["_commit_lsn"], batch["_seq"]))
        found = rows.agg(
            F.max(truncate).alias("truncated"),
            F.flatten(F.collect_set(names)).alias("names"),
            F.max((kind == "insert") & (F.size(names) > 0)).alias("inserts"),
        ).first()
        assert found is not None
        truncated_at = None if found["truncated"] is None else tuple(found["truncated"])
        listed = tuple(i for i in batch.values if batch.fields[i].name in set(found["names"]))
        return cls(truncated_at, listed, bool(found["inserts"]))


def _after_truncate(batch: _Batch, rows: DataFrame, found: _Found) -> DataFrame:
    """Leave out the rows before the last TRUNCATE."""
    if found.truncated_at is None:
        return rows
    lsn, seq = found.truncated_at
    at, number = batch["_commit_lsn"], batch["_seq"]
    return rows.where((at > lsn) | ((at == lsn) & (number >= seq)))


# Columns of the rows that are left: whether the row is the last of its key; the row that began its life, if that is in
# the batch; and for a delete, the state that it ended.
_LAST, _BEGUN, _ENDED = "last", "begun", "ended"


def _earlier(index: int) -> Column:
    """What the last earlier row of the same key says of a column: ``value``, ``known``, ``streamed``."""
    return F.col(f"e{index}")


def _with_history(batch: _Batch, rows: DataFrame, found: _Found) -> DataFrame:
    """Add to each row what the rows before it with the same key say: ``e…``, ``begun``, ``last``, ``previous``."""
    kind, lsn, seq, names = (batch[name] for name in ("_change_type", "_commit_lsn", "_seq", "_unchanged"))
    by_key = Window.partitionBy(*batch.key_columns).orderBy(lsn, seq)
    before = by_key.rowsBetween(Window.unboundedPreceding, -1)
    until = by_key.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    begins = kind.isin("snapshot", "insert", "delete")

    def said(i: int) -> Column:
        # A row that begins or ends a life says of every value whether it is known, so that none is taken from before.
        travelled = ~_lists(names, batch, i)
        known = travelled & (kind != "delete")
        state = F.struct(_column(i).alias("value"), known.alias("known"), (kind != "snapshot").alias("streamed"))
        return F.last(F.when(begins | travelled, state), ignorenulls=True).over(before)

    fingerprint = F.struct(lsn.alias("lsn"), seq.alias("seq"), F.xxhash64(kind, *batch.hashable).alias("hash"))
    begun = F.struct(kind.alias("kind"), lsn.alias("lsn"), F.col(_PAIR))
    return rows.select(
        "*",
        *(said(i).alias(f"e{i}") for i in found.listed),
        F.last(F.when(begins, begun), ignorenulls=True).over(until).alias(_BEGUN),
        F.lead(F.lit(True)).over(by_key).isNull().alias(_LAST),
        fingerprint.alias("this"),
        F.lag(fingerprint).over(by_key).alias("previous"),
    )


def _last_rows(batch: _Batch, rows: DataFrame, found: _Found) -> DataFrame:
    """Complete the last row of each key from its own key's rows; keep deletes as well, for keys that changed."""
    kind, names = batch["_change_type"], batch["_unchanged"]
    rows = _with_history(batch, rows, found)
    this, previous = F.col("this"), F.col("previous")
    again = F.coalesce((previous["lsn"] == this["lsn"]) & (previous["seq"] == this["seq"]), F.lit(False))
    rows = _failing(
        rows,
        again & (previous["hash"] != this["hash"]),
        f"collapse(): two rows have the same key ({batch.key_names}) and position",
        batch,
        "name all columns of the primary key",
    )
    update, delete = kind == "update", kind == "delete"
    carried = {i: update & _lists(names, batch, i) & _earlier(i)["known"] for i in found.listed}
    first_kind = F.col(_BEGUN)["kind"]
    changed = {
        **{i: F.when(there, _earlier(i)["value"]).otherwise(_column(i)) for i, there in carried.items()},
        batch.index("_change_type"): F.when(update & first_kind.isin("snapshot", "insert"), first_kind).otherwise(kind),
        batch.index("_unchanged"): _without(names, batch, carried),
    }
    # A row that came twice ended nothing the second time.
    ended = F.when(delete & previous.isNotNull() & ~again, F.struct(F.lit(True), *map(_earlier, found.listed)))
    rows = rows.where(F.col(_LAST) | delete)
    return rows.select(*batch.columns(changed), _LAST, _BEGUN, ended.alias(_ENDED), _PAIR)


def _with_values_of_former_key(batch: _Batch, rows: DataFrame, found: _Found) -> DataFrame:
    """Complete inserts from the rows that the deletes right before them ended."""
    kind, lsn, names = (batch[name] for name in ("_change_type", "_commit_lsn", "_unchanged"))
    begun = F.col(_BEGUN)
    takes = F.col(_LAST) & (kind == "insert") & (F.size(names) > 0)
    gives = F.col(_ENDED).isNotNull()
    # All others are spread by key: the rows of a snapshot have one position, and would meet in one task.
    spread = F.xxhash64(*batch.key_columns)
    met = Window.partitionBy(
        F.when(takes, begun["lsn"]).when(gives, lsn).otherwise(spread),
        F.when(takes, begun[_PAIR]).when(gives, F.col(_PAIR)).otherwise(F.lit(-1)),
    )
    rows = rows.withColumn("given", F.first(F.when(gives, F.col(_ENDED)), ignorenulls=True).over(met))

    def given(i: int) -> Column:
        return F.col("given")[f"e{i}"]

    # A column may also be listed because the stream has never had it; the delete before may then be of any row. Values
    # that came by the stream are not of such columns.
    carried = {i: takes & _lists(names, batch, i) & given(i)["known"] & given(i)["streamed"] for i in found.listed}
    changed = {
        **{i: F.when(there, given(i)["value"]).otherwise(_column(i)) for i, there in carried.items()},
        batch.index("_unchanged"): _without(names, batch, carried),
    }
    return rows.select(*batch.columns(changed), _LAST)


def _lists(names: Column, batch: _Batch, index: int) -> Column:
    return F.coalesce(F.array_contains(names, F.lit(batch.fields[index].name)), F.lit(False))


def _without(names: Column, batch: _Batch, found: Mapping[int, Column]) -> Column:
    """The names that are still to be listed."""
    if not found:
        return names
    there = F.array_compact(F.array(*(F.when(is_found, batch.fields[i].name) for i, is_found in found.items())))
    return F.when(F.size(names) > 0, F.array_except(names, there.cast("array<string>"))).otherwise(names)
