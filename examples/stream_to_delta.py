"""Keep a Delta table equal to a PostgreSQL table: python stream_to_delta.py URL TABLE KEY[,KEY...] TARGET CHECKPOINT

Needs pg-cdc-source[spark] and deltalake. KEY is the replica identity, by default the primary key. A run that meets
another column ends with [SCHEMA_CHANGED], and the next one has it; rows from before have NULL there, or what a dropped
column of that name had. mirror() does all this for whole schemas, also while it runs, and with any names and types.
"""

import sys

import pyarrow.compute as pc
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from pyspark.sql import DataFrame, SparkSession

from pg_cdc_source import collapse

# What an update leaves unchanged may not have travelled.
KEPT = """CASE WHEN s._change_type = 'update' AND array_contains(s._unchanged, '{0}') THEN t."{0}" ELSE s."{0}" END"""


def apply(batch: DataFrame, batch_id: int, path: str, keys: list[str]) -> None:
    """Merge a batch into the Delta table. The commit records the batch, so that a replayed batch is skipped."""
    query = str(batch.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId"))
    done = DeltaTable(path).transaction_version(query) if DeltaTable.is_deltatable(path) else None
    if done is not None and done >= batch_id:
        return
    rows = collapse(batch, keys).toArrow()
    names = rows.column_names[: rows.column_names.index("_change_type")]
    table = DeltaTable.create(path, rows.select(names).schema, mode="ignore")
    known = {field.name: field.type for field in table.schema().fields}
    fields = Schema.from_arrow(rows.select(names).schema).fields
    if other := [field.name for field in fields if known.get(field.name, field.type) != field.type]:
        raise TypeError(f"{path} has other types for {other}: delete it and the checkpoint, and drop the slot")
    if added := [field for field in fields if field.name not in known]:
        table.alter.add_columns(added)
    truncates = pc.equal(rows["_change_type"], "truncate")
    if pc.any(truncates).as_py():
        table.delete()
    rows = rows.filter(pc.invert(truncates))  # and rebuilt, as deltalake cannot read Spark 4.0's empty lists
    on, mark = " AND ".join(f't."{key}" = s."{key}"' for key in keys), Transaction(query, batch_id)
    merge = table.merge(rows, on, "s", "t", commit_properties=CommitProperties(app_transactions=[mark]))
    merge = merge.when_matched_update({f'"{n}"': KEPT.format(n) for n in names}, "s._change_type <> 'delete'")
    merge = merge.when_not_matched_insert({f'"{n}"': f's."{n}"' for n in names}, "s._change_type <> 'delete'")
    merge.when_matched_delete().execute()


if __name__ == "__main__":
    url, name, keys, target, checkpoint = sys.argv[1:]
    spark = SparkSession.builder.config("spark.sql.session.timeZone", "UTC").getOrCreate()
    changes = spark.readStream.format("pgcdc").options(url=url, dbtable=name, slot="to_delta", beforeImage=True).load()
    writer = changes.writeStream.foreachBatch(lambda batch, number: apply(batch, number, target, keys.split(",")))
    # Applies all changes up to now and ends; the next run continues from there. Without the trigger it never ends.
    writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start().awaitTermination()
