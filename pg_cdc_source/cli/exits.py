"""How commands end: with an error's text, for want of an extra, where they are given wrong, on SIGTERM."""

from __future__ import annotations

import logging
import re
import signal
import sys
from types import FrameType
from typing import Any

import typer
from typer.core import TyperGroup

from pg_cdc_source.cli.shown import shown
from pg_cdc_source.errors import PgCdcError
from pg_cdc_source.options.libpq_keywords import SECRET_KEYWORDS

# Typer has a Click of its own, or uses the one that is installed.
_UsageError: type[Any] = typer.BadParameter.__base__ or typer.BadParameter
_URL = re.compile(rf"://|(?:{'|'.join(SECRET_KEYWORDS)}|passwd|pass|pwd|secret)\s*=", re.IGNORECASE)


class Commands(TyperGroup):
    """Commands whose usage errors do not repeat a URL that is given in a wrong place: it may have a password."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except _UsageError as error:
            if _URL.search(error.message):
                error.message = (
                    "a URL or connection string is in the wrong place: pg-cdc check takes it as -o url=URL, slots, "
                    "mirror, resnapshot and adopt as their first argument"
                )
            raise


def failed(error: PgCdcError) -> typer.Exit:
    """Print an error, and return what ends the command with status 1."""
    typer.echo(shown(f"pg-cdc: {error}", keeping="\n"), err=True)
    return typer.Exit(1)


def lacking_extra(error: ModuleNotFoundError, extra: str) -> typer.Exit:
    """Print which extra brings the missing module, and return what ends the command with status 1."""
    typer.echo(f'pg-cdc: {error}\n  Remedy: pip install "pg-cdc-source[{extra}]"', err=True)
    return typer.Exit(1)


def leave_nothing_when_stopped() -> None:
    """Let SIGTERM end the command as Ctrl-C does, so that its server and files go; and keep py4j quiet then."""
    # py4j logs every call that Ctrl-C interrupts, with a traceback.
    logging.getLogger().addHandler(logging.NullHandler())
    signal.signal(signal.SIGTERM, _exit)


def _exit(signum: int, frame: FrameType | None) -> None:
    sys.exit(128 + signum)
