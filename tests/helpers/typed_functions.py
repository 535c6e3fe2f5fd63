"""The source of ``read`` and ``stream``, made of the declared options; readme_tables.py writes it."""

from __future__ import annotations

import re
import textwrap
from typing import Literal, get_origin, get_type_hints

from documents import ROOT

from pg_cdc_source.options import declared
from pg_cdc_source.options.declared import OPTIONS, Option
from pg_cdc_source.options.libpq_keywords import PASSED_KEYWORDS

MODULE = ROOT / "pg_cdc_source" / "spark" / "read.py"

_HEAD = '''"""``read`` and ``stream``: the formats as functions with their options as keywords.

Written by tests/helpers/readme_tables.py from pg_cdc_source/options/declared.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict

from pyspark.sql import DataFrame, SparkSession

from pg_cdc_source.options.declared import (
    {choices},
)
from pg_cdc_source.options.texts import option_texts
from pg_cdc_source.spark.register import ensure_registered

if TYPE_CHECKING:
    from typing import Unpack


class Libpq(TypedDict, total=False):
    """libpq's keywords, which both formats pass on."""

    {libpq}
'''
_FUNCTION = '''

def {name}(
    spark: SparkSession,
    *,
    {parameters},
    **libpq: Unpack[Libpq],
) -> DataFrame:
    """{summary}

    The arguments are the options of the format; a list is its items with commas between them. libpq's keywords, such as
    ``sslmode``, may be given as well. The session is classic or of Spark Connect; it needs no ``register()``.

    Args:
        spark: the session
{arguments}
    """
    given = dict(locals())
    named = {{name: value for name, value in given.items() if name not in ("spark", "libpq")}}
    ensure_registered(spark)
    return spark.{reader}.format("{format}").options(**option_texts({{**named, **libpq}})).load()
'''
_FUNCTIONS = (
    ("read", "pgsnapshot", "read", "Load a table or query as of one point in time, as the format ``pgsnapshot`` does."),
    ("stream", "pgcdc", "readStream", "Load tables and their changes as a stream, as the format ``pgcdc`` does."),
)


def options_of(format: str) -> list[Option]:
    return [option for option in OPTIONS if option.group in ("connection", format)]


def choices_of(option: Option) -> str | None:
    """The name of the Literal that has the choices of an option."""
    name = option.name[0].upper() + option.name[1:]
    return name if get_origin(getattr(declared, name, None)) is Literal else None


def annotation_of(option: Option) -> str:
    """What an option may be in Python: what its parser makes of a text, or the text."""
    parsed = str(get_type_hints(option.parse)["return"])
    if (choices := choices_of(option)) is not None:
        return choices
    if option.name == "port":
        return "int | str"
    if parsed.startswith("tuple"):
        return "str | Sequence[str]"
    return {str(bool): "bool", str(int): "int | str", str(float): "float | str"}.get(parsed, "str")


def is_required(option: Option) -> bool:
    return option.without == "required"


def parameter_of(option: Option) -> str:
    return f"{option.name}: {annotation_of(option)}" + ("" if is_required(option) else " | None = None")


def description_of(option: Option) -> str:
    if is_required(option):
        return f"{option.name}: {option.meaning}"
    default = option.without if option.default is None else f"`{option.default}`"
    return f"{option.name}: {option.meaning}" + (f"; default: {default}" if default != "none" else "")


def source() -> str:
    """The module's text as ruff formats it."""
    choices = sorted({choices for option in OPTIONS if (choices := choices_of(option)) is not None})
    libpq = "\n    ".join(f"{keyword}: str | int" for keyword in sorted(PASSED_KEYWORDS))
    return _HEAD.format(choices=",\n    ".join(choices), libpq=libpq) + "".join(_function(*row) for row in _FUNCTIONS)


def _function(name: str, format: str, reader: str, summary: str) -> str:
    options = options_of(format)
    wrapped = [
        textwrap.fill(
            re.sub(r"`+", "``", description_of(option)),
            width=120,
            initial_indent=" " * 8,
            subsequent_indent=" " * 12,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for option in options
    ]
    return _FUNCTION.format(
        name=name,
        format=format,
        reader=reader,
        summary=summary,
        parameters=",\n    ".join(map(parameter_of, options)),
        arguments="\n".join(wrapped),
    )
