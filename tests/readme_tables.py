"""The README's generated tables; ``python tests/readme_tables.py`` writes them from the code."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema

from pg_cdc_source import types
from pg_cdc_source.conninfo import LIBPQ_KEYWORDS
from pg_cdc_source.options import NumericAs, option_table_markdown

README = Path(__file__).parents[1] / "README.md"


def _spark_type(column: types.Column) -> str:
    codec = types.plan(column, as_string=False, numeric_as=NumericAs("string"))
    schema = from_arrow_schema(pa.schema([pa.field("value", codec.arrow_type)]), prefer_timestamp_ntz=True)
    return schema["value"].dataType.simpleString().upper()


def type_table() -> str:
    rows = []
    for pg_type in types.TYPES:
        if pg_type.decoder is None:
            declared = types.Column("value", 1, pg_type.oid, (12 << 16 | 2) + 4, "numeric(12,2)", False)
            rows.append(("numeric(p,s), p ≤ 38", _spark_type(declared).replace("12,2", "p,s")))
        column = types.Column("value", 1, pg_type.oid, -1, pg_type.name, False)
        name = "numeric, or p > 38" if pg_type.decoder is None else pg_type.name
        rows.append((name, _spark_type(column) + (" (see `numericAs`)" if pg_type.decoder is None else "")))
    by_spark: dict[str, list[str]] = {}
    for name, spark in rows:
        by_spark.setdefault(spark, []).append(name)
    lines = [f"| {', '.join(f'`{name}`' for name in names)} | {spark} |" for spark, names in by_spark.items()]
    lines.append("| one-dimensional arrays of all these | ARRAY of the element's type |")
    lines.append("| domains | as their base type |")
    lines.append("| every other type | STRING, exactly as PostgreSQL prints it |")
    return "\n".join(["| PostgreSQL | Spark |", "| --- | --- |", *lines])


TABLES = {
    "connection options": lambda: option_table_markdown("connection"),
    "pgsnapshot options": lambda: option_table_markdown("pgsnapshot"),
    "pgcdc options": lambda: option_table_markdown("pgcdc"),
    "libpq keywords": lambda: ", ".join(f"`{keyword}`" for keyword in sorted(LIBPQ_KEYWORDS)) + ".",
    "types": type_table,
}


def with_tables(text: str) -> str:
    """Return the README's text with each generated table as the code gives it now."""
    for name, table in TABLES.items():
        begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
        text, found = re.subn(
            f"{re.escape(begin)}.*?{re.escape(end)}",
            lambda _, b=begin, e=end, t=table: f"{b}\n{t().strip()}\n\n{e}",  # type: ignore[misc]
            text,
            flags=re.DOTALL,
        )
        if found != 1:
            raise ValueError(f"README.md has {found} places for the table {name!r}")
    return text


if __name__ == "__main__":
    README.write_text(with_tables(README.read_text()))
