"""Keep every change of a schema's tables, as an append-only log in Parquet: python append_log.py URL SCHEMA TARGET

Needs pg-cdc-source[spark]. Spark's file sink writes each batch once, even if it is replayed; for other readers than
Spark, that is what _spark_metadata names. Tables and columns may come and go: a row 'schema' says what a table's
columns are from there on.
"""

import sys

from pyspark.sql import SparkSession

url, schema, target = sys.argv[1:]
spark = SparkSession.builder.getOrCreate()
options = {"url": url, "tables": f"{schema}.*", "slot": "append_log", "onSchemaChange": "emit"}
changes = spark.readStream.format("pgcdc").options(**options).load()
# Of directories whose names begin with an underscore, pandas and DuckDB see nothing.
changes = changes.withColumnRenamed("_table", "table")
log = changes.writeStream.format("parquet").partitionBy("table").option("path", f"{target}/log")
# Writes all changes up to now and ends; the next run continues from there. Without the trigger it never ends.
log.option("checkpointLocation", f"{target}/checkpoint").trigger(availableNow=True).start().awaitTermination()
