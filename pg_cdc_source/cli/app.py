"""The command ``pg-cdc``: its subcommands, one module each."""

from __future__ import annotations

from typing import Annotated

try:
    import typer

    from pg_cdc_source import __version__
    from pg_cdc_source.cli.adopt import adopt
    from pg_cdc_source.cli.bench import bench
    from pg_cdc_source.cli.check import check
    from pg_cdc_source.cli.demo import demo
    from pg_cdc_source.cli.exits import Commands
    from pg_cdc_source.cli.mirror import mirror
    from pg_cdc_source.cli.resnapshot import resnapshot
    from pg_cdc_source.cli.slots import slots
except ImportError as error:
    raise SystemExit(f'pg-cdc: {error}\n  Remedy: pip install "pg-cdc-source[cli]"') from None

# Typer's own tracebacks show local variables, and with them passwords.
app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pg-cdc {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Read PostgreSQL into Spark: consistent snapshots of tables, and a stream of their changes from there."""


app.command()(check)
app.command()(slots)
app.command()(mirror)
app.command()(resnapshot)
app.command()(adopt)
app.command()(demo)
app.command()(bench)
