"""Where each table goes: a template with ``{schema}`` and ``{table}``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from string import Formatter

from pg_cdc_source.errors import OptionError
from pg_cdc_source.options.names import QualifiedName

LEDGER = "_pgcdc"
_PLACES = ("schema", "table")
# delta-rs takes a path for a URL. At one with # or ?, it writes a table whose history is empty; others it refuses, or
# panics. Spark takes some of them for a pattern when it reads the files.
NOT_FOR_DELTA_RS = "#?%[]{}^|*\\"


@dataclass(frozen=True, slots=True)
class Targets:
    """Names of the lake's tables, or their paths, and that of the ledger. ``forbidden``: characters that none has."""

    template: str
    ledger: str
    forbidden: str = ""

    @classmethod
    def of(cls, template: str, ledger: str | None, forbidden: str = "") -> Targets:
        """Read a template. Raises OptionError."""
        try:
            parts = Formatter().parse(template)
            places = [_placeholder(name, spec, conversion) for _, name, spec, conversion in parts if name is not None]
        except ValueError as error:
            raise OptionError(
                f"target {template!r} is no template: {error}", remedy="write it as in '/lake/{table}'"
            ) from None
        for place in places:
            if place not in _PLACES:
                raise OptionError(
                    f"target {template!r} has the placeholder {{{place}}}", remedy="use {table} and {schema}"
                )
        if "table" not in places:
            raise OptionError(f"target {template!r} has no {{table}}", remedy="write it as in '/lake/{schema}/{table}'")
        if ledger is None:
            if "schema" in places:
                raise OptionError(
                    f"target {template!r} has {{schema}}, so the ledger belongs to none of its schemas",
                    remedy="say in ledger where the ledger is to be",
                )
            ledger = template.format(table=LEDGER)
        for what, place in (("target", template.format(schema="", table="")), ("ledger", ledger)):
            if found := sorted(set(place) & set(forbidden)):
                raise OptionError(
                    f"{what} {place!r} has {' '.join(found)}, which no path of this format can have",
                    remedy="choose another directory, or the format delta or iceberg",
                )
        return cls(template, ledger, forbidden)

    @property
    def has_own_ledger(self) -> bool:
        """Whether the ledger is beside the tables, as it is where nobody says another place."""
        return "{schema}" not in self.template and self.ledger == self.template.format(table=LEDGER)

    def __getitem__(self, table: str) -> str:
        """Where a table goes that the stream calls ``table``.

        Raises OptionError for a name that would lead elsewhere.
        """
        schema, name = QualifiedName.parse(table).parts
        for part in (schema, name):
            if part in (".", "..") or "/" in part or "\\" in part:
                raise OptionError(
                    f"{table} has a name that cannot be a directory's",
                    remedy="rename it in PostgreSQL, or leave it out of the option tables",
                )
            if found := sorted(set(part) & set(self.forbidden)):
                raise OptionError(
                    f"{table} has {' '.join(found)} in its name, which no path of the lake's format can have",
                    remedy="rename it in PostgreSQL, leave it out of the option tables, or use another format",
                )
            if "${" in part:
                raise OptionError(
                    f"{table} has ${{ in its name, which Spark takes for a variable wherever a statement has it",
                    remedy="rename it in PostgreSQL, or leave it out of the option tables",
                )
        return self.template.format(schema=schema, table=name)

    def shared(self, tables: Iterable[str]) -> dict[str, OptionError]:
        """The tables whose place is that of the ledger, or of one before them; what is to be said of each."""
        found: dict[str, OptionError] = {}
        taken = {self.ledger.lower(): "the ledger"}
        for table in tables:
            # Catalogs and some file systems do not tell upper from lower case.
            place = self[table]
            if (other := taken.setdefault(place.lower(), table)) != table:
                found[table] = OptionError(
                    f"target {self.template!r} has one place for {other} and {table}: {place}",
                    remedy="use {schema} and {table}, as in '/lake/{schema}/{table}'; or mirror them with two queries, "
                    "each with a ledger of its own",
                )
        return found


def _placeholder(name: str, spec: str | None, conversion: str | None) -> str:
    """Return what stands between the braces."""
    return name + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
