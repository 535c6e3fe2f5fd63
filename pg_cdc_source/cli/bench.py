"""The command ``pg-cdc bench``."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from pg_cdc_source.cli.exits import failed, lacking_extra, leave_nothing_when_stopped
from pg_cdc_source.errors import PgCdcError


def bench(
    only: Annotated[
        list[str] | None,
        typer.Option(help="Ask only the question of this name, or all whose names start with it. May be repeated."),
    ] = None,
    rows: Annotated[int | None, typer.Option(min=1_000, help="Rows of the wide table.", show_default="4000000")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Measured rounds.", show_default="5")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Few rows and one round: shows that it runs; the numbers mean nothing.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Directory for results.json and the plots.")] = Path("benchmarks"),
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Measure the connector against other readers and against the hardware's limit.

    All contenders take turns in one run. The benchmark starts its own PostgreSQL server (from PG_CDC_TEST_BIN, if set)
    and Spark, and removes both when it ends. Readers that are not installed are listed as missing.
    """
    try:
        from pg_cdc_source.bench import report, run
    except ModuleNotFoundError as error:
        raise lacking_extra(error, "bench") from None
    leave_nothing_when_stopped()
    try:
        names = run.chosen(only or [])
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--only") from None
    try:
        scale = run.scale(quick=quick, rows=rows, rounds=rounds)
        with contextlib.closing(run.run(names, scale, run.command())) as reports:
            for found in reports:
                # A run takes an hour, and an error may end it.
                report.write_json(found, out)
    except PgCdcError as error:
        raise failed(error) from None
    report.write(found, out)
    (report.print_json if json else report.print_tables)(found)
