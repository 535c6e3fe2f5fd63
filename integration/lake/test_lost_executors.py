"""A mirror's batch in a Spark that compares what a map task gives when it runs again."""

from __future__ import annotations

from pathlib import Path

import pyspark
from pyspark.sql import SparkSession

from pg_cdc_source.lake.bring import Mark
from pg_cdc_source.lake.first_files import FirstFiles
from pg_cdc_source.lake.shape import Shapes
from pg_cdc_source.lake.targets import Targets
from pg_cdc_source.lake.tasks import Start
from pg_cdc_source.mirrors.delta_rs import DeltaRsTask
from pg_cdc_source.mirrors.lakes import CHECKSUMS, run_task
from pg_cdc_source.protocol.layout import RUNS_SCHEMA
from pg_cdc_source.spark.edge import spark_schema


def test_files_with_new_names_are_no_reason_to_give_up_a_batch(spark: SparkSession, tmp_path: Path) -> None:
    session = spark.newSession()
    targets = Targets.of(f"{tmp_path}/{{table}}", None)
    task = DeltaRsTask(targets, Start(Mark("q", 0), {}, {}), Shapes(), compacts=False)
    nothing = session.createDataFrame([], spark_schema(RUNS_SCHEMA))
    assert run_task(nothing, task, FirstFiles(targets=targets)) == []
    # A Spark that has it under another name by now has to be looked at.
    has_it = tuple(map(int, pyspark.__version__.split(".")[:2])) >= (4, 3)
    assert session.conf.isModifiable(CHECKSUMS) >= has_it
    if has_it:
        assert session.conf.get(CHECKSUMS) == "false"
        assert spark.conf.get(CHECKSUMS) == "true"
