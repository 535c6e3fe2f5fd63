"""Keep a Delta table equal to a PostgreSQL table: python stream_to_delta.py URL TABLE KEY[,KEY...] TARGET CHECKPOINT

Needs the package deltalake. All rows of a batch pass through this process; the table's snapshot is one batch."""

import sys

from deltalake import CommitProperties, DeltaTable, Transaction
from pyspark.sql import DataFrame, SparkSession

from pg_cdc_source import collapse

KEPT = """CASE WHEN array_contains(s._unchanged, '{0}') THEN t."{0}" ELSE s."{0}" END"""


def apply(batch: DataFrame, batch_id: int, path: str, keys: list[str]) -> None:
    """Bring the Delta table to where the batch ends. The commit that does it says so: a replay finds it done."""
    query = str(batch.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId"))
    done = DeltaTable(path).transaction_version(query) if DeltaTable.is_deltatable(path) else None
    if done is not None and done >= batch_id:
        return
    rows = collapse(batch, keys).toArrow()
    names = rows.column_names[: rows.column_names.index("_change_type")]
    table = DeltaTable.create(path, rows.select(names).schema, mode="ignore")
    if "truncate" in rows["_change_type"].to_pylist():
        table.delete()
    on = " AND ".join(f't."{key}" = s."{key}"' for key in keys)
    mark = CommitProperties(app_transactions=[Transaction(query, batch_id)])
    merge = table.merge(rows, on, "s", "t", commit_properties=mark).when_matched_delete("s._change_type = 'delete'")
    merge = merge.when_matched_update({f'"{name}"': KEPT.format(name) for name in names})
    new = {f'"{name}"': f's."{name}"' for name in names}
    merge.when_not_matched_insert(new, "s._change_type NOT IN ('delete', 'truncate')").execute()


if __name__ == "__main__":
    url, name, keys, target, checkpoint = sys.argv[1:]
    spark = SparkSession.builder.config("spark.sql.session.timeZone", "UTC").getOrCreate()
    changes = spark.readStream.format("pgcdc").options(url=url, dbtable=name, slot="to_delta").load()
    writer = changes.writeStream.foreachBatch(lambda batch, number: apply(batch, number, target, keys.split(",")))
    # Ends when all is applied, and the next run goes on there; without the trigger it goes on for ever.
    writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start().awaitTermination()
