"""Names of tables in Spark's catalogs, as SQL has them."""

from __future__ import annotations

from pg_cdc_source.lake.targets import LEDGER, Targets
from pg_cdc_source.options.names import QualifiedName


def is_path(target: str) -> bool:
    """Whether a target is a path, and not a table's name in a catalog."""
    return "/" in target


def quoted(name: str) -> str:
    """Quote a column's name, or a part of a table's."""
    return "`" + name.replace("`", "``") + "`"


def table_in_sql(targets: Targets, table: str, provider: str) -> str:
    """Return the name, for SQL, of the lake's table of a table of PostgreSQL; a path is one of the format's own."""
    schema, name = QualifiedName.parse(table).parts
    if is_path(targets.template):
        return f"{provider}.{quoted(targets[table])}"
    return _in_template(targets.template, schema, name)


def ledger_in_sql(targets: Targets, provider: str) -> str:
    """Return the ledger's name for SQL."""
    if is_path(targets.ledger):
        return f"{provider}.{quoted(targets.ledger)}"
    if targets.ledger == targets.template.format(schema="", table=LEDGER):
        return _in_template(targets.template, "", LEDGER)
    return targets.ledger


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


def _in_template(template: str, schema: str, table: str) -> str:
    return ".".join(quoted(part.format(schema=schema, table=table)) for part in template.split("."))
