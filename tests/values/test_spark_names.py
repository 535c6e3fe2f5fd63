"""The names of Spark's types are those that Spark prints."""

from __future__ import annotations

import pyarrow as pa
import pytest
from columns import OIDS, codec, typmod
from pyspark.sql.pandas.types import from_arrow_type

from pg_cdc_source.values.spark_names import spark_name


@pytest.mark.parametrize("array", [False, True])
@pytest.mark.parametrize("name", OIDS)
def test_every_type_has_sparks_name(name: str, array: bool) -> None:
    arrow: pa.DataType = codec(name, typmod(10, 2) if name == "numeric" else -1, array=array).arrow_type
    assert spark_name(arrow) == from_arrow_type(arrow, prefer_timestamp_ntz=True).simpleString()
