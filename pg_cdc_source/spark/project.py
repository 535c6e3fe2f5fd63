"""``project``: types for the rows of one table out of an envelope."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from pg_cdc_source.errors import OptionError, SchemaChangedError, WireError
from pg_cdc_source.offsets import Lsn
from pg_cdc_source.options.declared import OPTIONS
from pg_cdc_source.options.names import QualifiedName
from pg_cdc_source.options.snapshot_options import SnapshotOptions, parse_snapshot_options
from pg_cdc_source.options.texts import option_texts
from pg_cdc_source.protocol.envelope import OTHER_TYPE, columns_from_json
from pg_cdc_source.protocol.layout import BEFORE, CHANGE_FIELDS, typed_schema
from pg_cdc_source.protocol.refused import RefusedValueError, accept
from pg_cdc_source.protocol.stream_rows import envelope_columns
from pg_cdc_source.snapshot.scan import make_plan
from pg_cdc_source.spark.copies import Sealed
from pg_cdc_source.spark.edge import CHANGE_NAMES, expect_columns, short_errors, spark_schema
from pg_cdc_source.spark.worker_tuning import small_task
from pg_cdc_source.values.arrow import field_of
from pg_cdc_source.values.registry import Codec

_ENVELOPE_NAMES = ("_table", *CHANGE_NAMES, "key", "after", "before")
_IMAGE = "image"
_ONE_TABLE = "name one table, as the column _table has it"
_VALUE_OPTIONS = frozenset(("asString", "numericAs", "unrepresentable"))


def project(
    df: DataFrame,
    table: str,
    *,
    url: str | None = None,
    beforeImage: bool = False,  # noqa: N803 (options are named as Spark's are)
    **options: str | int | bool,
) -> DataFrame:
    """Return the rows of one table out of an envelope, typed as the option ``dbtable`` types that table.

    ``df`` has the envelope's columns, as the option ``tables`` gives them, streaming or not. ``table`` is looked up in
    PostgreSQL now, with the connection's options (``url`` and the others). ``asString``, ``numericAs``,
    ``unrepresentable`` and ``beforeImage`` mean what they mean for ``pgcdc``. A column that a row of the envelope
    lacks, because it was added later or the publication does not send it, is NULL and listed in ``_unchanged``. Rows
    ``schema`` are left out. Columns are told by their names: a row from before names were exchanged or used again has
    its values under the names of then.

    Raises OptionError and the errors of looking up a table. The query raises UnrepresentableError, and
    SchemaChangedError if rows have other columns than the table has now.
    """
    expect_columns(df, _ENVELOPE_NAMES, "project() takes what the option tables gives of pgcdc")
    plan = make_plan(_projection_options(table, url, options))
    assert plan.relation is not None
    name = str(QualifiedName((plan.relation.schema, plan.relation.name)))
    if plan.relation.kind not in "rp":
        raise OptionError(f"{name} is no table, so a stream has no rows of it", remedy="name a table of the stream")
    codecs = tuple(plan.codecs)
    projection = _Projection(name, codecs, plan.spec.unrepresentable, beforeImage)

    # A delete has the values of the row it ended: all that travelled, at least the key.
    old = F.coalesce(F.col("before"), F.col("key"))
    image = F.when(F.col("_change_type") == "delete", old).otherwise(F.col("after"))
    rows = df.where((F.col("_table") == name) & (F.col("_change_type") != "schema"))
    rows = rows.select(*CHANGE_NAMES, image.alias(_IMAGE), "before")
    # Not the method itself: its function would be looked up before the versions are compared.
    return rows.mapInArrow(lambda batches: projection.read(batches), spark_schema(projection.schema))


def _projection_options(table: str, url: str | None, options: dict[str, str | int | bool]) -> SnapshotOptions:
    given = option_texts(options)
    own = {option.name.lower() for option in OPTIONS if option.name not in _VALUE_OPTIONS}
    own -= {option.name.lower() for option in OPTIONS if option.group == "connection"}
    for name in given:
        if name.lower() in own:
            raise OptionError(
                f"project() does not use the option {name}",
                remedy=f"remove it: beside the connection's options there are {', '.join(sorted(_VALUE_OPTIONS))}",
            )
    # A query has no rows in the envelope.
    QualifiedName.parse(table, for_query=_ONE_TABLE, for_several=_ONE_TABLE)
    if url is not None:
        given["url"] = url
    return parse_snapshot_options({**given, "dbtable": table})


@dataclass(frozen=True)
class _Projection(Sealed):
    """How rows of one table are decoded, on executors."""

    table: str
    codecs: tuple[Codec, ...]
    unrepresentable: Literal["error", "null"]
    before_image: bool

    @property
    def schema(self) -> pa.Schema:
        return typed_schema(self.table, self.codecs, before_image=self.before_image)

    def read(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with small_task(), short_errors():
            for batch in batches:
                if batch.num_rows:
                    yield self.typed(batch)

    def typed(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Decode at least one row: change columns, then the objects ``image`` and ``before``."""
        # Spark may hand over another time zone, or offsets of 64 bits.
        changes = {field.name: batch.column(field.name).cast(field.type) for field in CHANGE_FIELDS}
        arrays, present = self._decode(batch, _IMAGE)
        changes["_unchanged"] = self._with_absent(changes["_unchanged"], changes["_change_type"], present)
        arrays += changes.values()
        if self.before_image:
            struct_type = self.schema.field(BEFORE).type
            missing = batch.column("before").is_null()
            olds, _ = self._decode(batch, "before")
            arrays.append(pa.StructArray.from_arrays(olds, fields=list(struct_type), mask=missing))
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _decode(self, batch: pa.RecordBatch, objects: str) -> tuple[list[pa.Array], list[pa.BooleanArray]]:
        """Return the columns' values, and for each column which rows have it."""
        columns = columns_from_json(batch.column(objects).cast(pa.string()), envelope_columns(self.codecs))
        texts, present = zip(*columns, strict=True)
        return [self._values(batch, codec, text) for codec, text in zip(self.codecs, texts, strict=True)], list(present)

    def _with_absent(
        self, unchanged: pa.ListArray, change_type: pa.StringArray, present: Sequence[pa.BooleanArray]
    ) -> pa.ListArray:
        """List in ``_unchanged`` the columns that whole rows lack: their NULL is not the value."""
        whole = pc.is_in(change_type, pa.array(["snapshot", "insert", "update"]))
        lists: list[list[str]] | None = None
        for codec, there in zip(self.codecs, present, strict=True):
            lacking = np.flatnonzero(pc.and_not(whole, there).to_numpy(zero_copy_only=False))
            if len(lacking):
                lists = unchanged.to_pylist() if lists is None else lists
                for row in lacking:
                    if codec.column.name not in lists[row]:
                        lists[row].append(codec.column.name)
        return unchanged if lists is None else pa.array(lists, unchanged.type)

    def _values(self, batch: pa.RecordBatch, codec: Codec, texts: pa.StringArray) -> pa.Array:
        before_column = f"envelope: {self.table}, "
        try:
            return accept(before_column, self.unrepresentable, codec.column, codec.decode_text, field_of(texts))
        except RefusedValueError as refused:
            lsn, seq = (batch.column(name)[refused.row].as_py() for name in ("_commit_lsn", "_seq"))
            place = f"the change at {Lsn(seq)} in the commit at {Lsn(lsn)} (_commit_lsn {lsn}, _seq {seq})"
            raise refused.at(self.table, place) from None
        except WireError as error:
            raise SchemaChangedError(error.what, remedy=OTHER_TYPE) from None
