"""What Spark calls an Arrow type, as ``DESCRIBE`` prints it."""

from __future__ import annotations

import pyarrow as pa

_NAMES = {
    pa.bool_(): "boolean",
    pa.int16(): "smallint",
    pa.int32(): "int",
    pa.int64(): "bigint",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.string(): "string",
    pa.binary(): "binary",
    pa.date32(): "date",
    pa.timestamp("us"): "timestamp_ntz",
    pa.timestamp("us", tz="UTC"): "timestamp",
}


def spark_name(arrow: pa.DataType) -> str:
    """Return the name of the Spark type that values of an Arrow type come as."""
    if pa.types.is_decimal(arrow):
        return f"decimal({arrow.precision},{arrow.scale})"
    if pa.types.is_map(arrow):
        return f"map<{spark_name(arrow.key_type)},{spark_name(arrow.item_type)}>"
    if pa.types.is_list(arrow):
        return f"array<{spark_name(arrow.value_type)}>"
    return _NAMES[arrow]
