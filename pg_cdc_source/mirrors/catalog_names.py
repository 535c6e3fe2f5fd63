"""Names of tables in Spark's catalogs, as SQL has them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from pg_cdc_source.errors import OptionError
from pg_cdc_source.lake.targets import Targets
from pg_cdc_source.options.names import QualifiedName


def is_path(target: str) -> bool:
    """Whether a target is a path, and not a table's name in a catalog."""
    return "/" in target


def backquoted(name: str) -> str:
    """Quote a column's name, or a part of a table's."""
    return "`" + name.replace("`", "``") + "`"


def table_in_sql(targets: Targets, table: str, provider: str) -> str:
    """Return the name, for SQL, of the lake's table of a table of PostgreSQL; a path is one of the format's own."""
    schema, name = QualifiedName.parse(table).parts
    if is_path(targets.template):
        return f"{provider}.{backquoted(targets[table])}"
    return _in_sql(part.format(schema=schema, table=name) for part in parts_of(targets.template))


def ledger_in_sql(targets: Targets, provider: str) -> str:
    """Return the ledger's name for SQL."""
    if is_path(targets.ledger):
        return f"{provider}.{backquoted(targets.ledger)}"
    return _in_sql(parts_of(targets.ledger))


def namespace_of(name: str) -> str | None:
    """Return the namespace of a table's name in SQL; None where it has none."""
    # A part in backticks ends at the first single one.
    at, in_quotes = None, False
    for i, letter in enumerate(name):
        if letter == "`":
            in_quotes = not in_quotes
        elif letter == "." and not in_quotes:
            at = i
    return None if at is None else name[:at]


_PART = re.compile(r"`((?:[^`]|``)+)`|([^.`]+)")


def parts_of(name: str) -> list[str]:
    """The parts of a table's name, or of a template. Raises OptionError for what is none."""
    parts, at = [], 0
    while match := _PART.match(name, at):
        parts.append(match[2] if match[1] is None else match[1].replace("``", "`"))
        at = match.end()
        if at == len(name):
            return parts
        if name[at] != ".":
            break
        at += 1
    raise OptionError(
        f"{name!r} is not the name of a table in a catalog",
        remedy="write it as in 'lake.shop.{table}', and a part with a dot in backticks",
    )


def _in_sql(parts: Iterable[str]) -> str:
    return ".".join(map(backquoted, parts))
