"""The server and options as commands take them: ``URL``, and ``--option NAME=VALUE``, repeated."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated

import typer

Url = Annotated[str, typer.Argument(help="The server, as in the option url: a libpq URI or connection string.")]
ConnectionOption = Annotated[
    list[str] | None,
    typer.Option("--option", "-o", metavar="NAME=VALUE", help="A further option of the connection. May be repeated."),
]


def given_options(texts: Sequence[str]) -> dict[str, str]:
    """The options by name; a malformed or repeated one ends the command."""
    given: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        # The message repeats no part of it: it may be a URL with a password, without the option's name.
        if not equals or not re.fullmatch(r"[\w.]+", name):
            raise typer.BadParameter("it is not of the form NAME=VALUE", param_hint="--option")
        if name in given:
            raise typer.BadParameter(f"{name} is given twice", param_hint="--option")
        given[name] = value
    return given
