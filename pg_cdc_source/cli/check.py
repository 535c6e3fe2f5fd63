"""The command ``pg-cdc check``."""

from __future__ import annotations

import json as json_format
from collections.abc import Sequence
from dataclasses import asdict
from enum import Enum
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from pg_cdc_source.cli.given_options import given_options
from pg_cdc_source.cli.preflight.findings import Finding, Status, is_right
from pg_cdc_source.cli.shown import shown

_STYLES: dict[Status, str] = {"ok": "green", "warning": "yellow", "wrong": "bold red", "not done": "dim"}


class _Format(str, Enum):
    PGSNAPSHOT = "pgsnapshot"
    PGCDC = "pgcdc"


def check(
    format_name: Annotated[
        _Format | None, typer.Argument(metavar="[pgsnapshot|pgcdc]", help="Check a read by this format.")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-o", metavar="NAME=VALUE", help="An option of the format. May be repeated."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Find everything that would prevent a snapshot or a stream from working, each with its remedy.

    With a format and its options, check the installation, the server and the tables. Without a format, check the
    installation and Spark's Python processes. Nothing is changed on the server. The command exits with status 1 if
    anything is wrong; a warning is no failure.
    """
    try:
        from pg_cdc_source.cli import preflight
    except ImportError as error:
        typer.echo(f"pg-cdc: {error}\n  Remedy: reinstall the package with its dependencies", err=True)
        raise typer.Exit(1) from None
    given = given_options(option or [])
    if given and format_name is None:
        raise typer.BadParameter(
            "name the format that these options are for: pgsnapshot or pgcdc", param_hint="--option"
        )
    findings = preflight.check(None if format_name is None else format_name.value, given)
    (_print_json if json else _print_text)(findings)
    if not is_right(findings):
        raise typer.Exit(1)


def _print_json(findings: Sequence[Finding]) -> None:
    print(json_format.dumps({"ok": is_right(findings), "findings": [asdict(finding) for finding in findings]}))


def _print_text(findings: Sequence[Finding]) -> None:
    # Lines are not wrapped, so that SQL can be copied.
    console = Console(highlight=False, soft_wrap=True, emoji=False)
    for finding in findings:
        status = Text(f"{finding.status:<8}", _STYLES[finding.status])
        console.print(status, f"{finding.check:<11} {shown(finding.text)}", markup=False)
        if finding.remedy:
            console.print(f"{'':20} Remedy: {shown(finding.remedy)}", markup=False)
    wrong = sum(finding.status == "wrong" for finding in findings)
    console.print("[green]Nothing is wrong.[/]" if not wrong else f"[bold red]Wrong: {wrong}.[/]")
