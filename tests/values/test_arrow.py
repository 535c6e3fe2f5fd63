"""Arrow's arrays as Python takes them."""

from __future__ import annotations

from datetime import datetime, timezone

import pyarrow as pa
import pytest

from pg_cdc_source.values.arrow import in_utc


@pytest.mark.parametrize("zone", ["GMT+08:00", "UTC+8", "Z", "Asia/Kathmandu", "UTC"])
def test_times_of_every_zone_that_spark_names_are_read(zone: str) -> None:
    rows = pa.record_batch({
        "at": pa.array([0, None], pa.timestamp("us", zone)),
        "local": pa.array([0, 1], pa.timestamp("us")),
        "n": pa.array([1, 2]),
    })  # fmt: skip
    epoch = datetime(1970, 1, 1, tzinfo=timezone.utc)
    for found in (in_utc(rows), in_utc(pa.Table.from_batches([rows]))):
        assert found.column("at").to_pylist() == [epoch, None]
        assert found.schema.field("local").type == pa.timestamp("us")
        assert found.column("n").to_pylist() == [1, 2]
