"""What tables keep, as it is asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pg_cdc_source.errors import OptionError
from pg_cdc_source.lake.first_files import FIRST_FILES, FirstFiles
from pg_cdc_source.lake.shape import Shape, Shapes


def test_each_table_has_the_mode_that_was_given_for_it() -> None:
    shapes = Shapes.of({"public.Orders": "history", "*": "append", 'public."b c"': "merge"}, "soft", "delta")
    texts = [shapes[name].text for name in ("public.orders", "public.items", 'public."b c"')]
    assert texts == ["history", "append", "merge, soft deletes"]
    assert [Shapes.of("merge", deletes, "delta")["a.b"].text for deletes in ("hard", "soft")] == [
        *("merge", "merge, soft deletes"),
    ]
    # Without a mode for all others, they are merged.
    assert Shapes.of({"public.t": "append"}, "soft", "iceberg")["public.u"].columns.keys() == {
        "_is_deleted",
        "_deleted_lsn",
    }


@pytest.mark.parametrize(
    ("mode", "deletes", "changes"),
    [("log", "hard", "evolve"), ({"public.t": "log"}, "hard", "evolve"), ("merge", "never", "evolve"),
     ("merge", "hard", "ignore"), ({"a.b.c.d": "merge"}, "hard", "evolve"),
     ({"orders": "history"}, "hard", "evolve"), ({"shop.public.orders": "history"}, "hard", "evolve"),
     ({"public.a, public.b": "history"}, "hard", "evolve")],
)  # fmt: skip
def test_what_there_is_not_is_refused(mode: str | dict[str, str], deletes: str, changes: str) -> None:
    with pytest.raises(OptionError) as caught:
        Shapes.of(mode, deletes, "deltalake", changes)
    assert caught.value.remedy


def test_columns_are_text_where_they_are_named() -> None:
    wanted = 'public.Orders.valid_to, public.orders."Note", s.t.c'
    shapes = Shapes.of({"public.orders": "history"}, "soft", "delta", as_string=wanted, numeric_as="decimal(38, 9)")
    assert shapes["public.orders"].as_string == ("valid_to", "Note")
    assert (shapes["public.orders"].text, shapes["s.t"].text) == ("history", "merge, soft deletes")
    assert (shapes["s.t"].as_string, shapes["public.items"].as_string) == (("c",), ())
    # A checkpoint goes on with other columns.
    assert shapes.digest == Shapes.of({"public.orders": "history"}, "soft", "delta").digest
    assert json.loads(FirstFiles(shapes=shapes).text)["shapes"]["others"]["numeric_as"] == "decimal(38, 9)"
    assert FirstFiles.of({FIRST_FILES: FirstFiles(shapes=shapes).text}) == FirstFiles(shapes=shapes)


@pytest.mark.parametrize(
    "given", [{"as_string": "orders.c"}, {"as_string": "c"}, {"numeric_as": "double"}, {"unrepresentable": "NULL"}]
)
def test_types_that_there_are_not_are_refused(given: dict[str, str]) -> None:
    with pytest.raises(OptionError) as caught:
        Shapes.of("merge", "hard", "delta", **given)
    assert caught.value.remedy


@pytest.mark.parametrize("format", ["iceberg", "delta", "deltalake"])
def test_the_docs_name_every_column_that_a_format_has_itself(format: str) -> None:
    text = Path(__file__).parents[2].joinpath("docs", "mirror.md").read_text()
    reserved = Shape(format=format).reserved
    assert reserved
    assert [name for name in reserved if f"`{name}`" not in text] == []
