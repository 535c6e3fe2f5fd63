"""The README and the pages under docs/ say what the code does, and their links lead somewhere."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import readme_tables
from documents import PAGES, ROOT, anchors, blocks, links, name_of, prose

MOST_LINES_OF_README = 200


@pytest.mark.parametrize("page", readme_tables.TABLES)
def test_tables_are_those_of_the_code(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert readme_tables.with_tables(page, text) == text, "run: python tests/helpers/readme_tables.py"


def test_every_table_of_every_page_is_written_from_the_code() -> None:
    marked = {name_of(page): re.findall(r"<!-- begin (.*) -->", page.read_text(encoding="utf-8")) for page in PAGES}
    assert {page: names for page, names in marked.items() if names} == {
        page: list(tables) for page, tables in readme_tables.TABLES.items()
    }


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_examples_compile(page: Path) -> None:
    for block in blocks(page):
        if block.language in ("python", "py"):
            ast.parse(block.text)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for path, anchor in links(page):
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_of_this_repository_that_are_named_exist(page: Path) -> None:
    named = re.findall(r"`((?:pg_cdc_source|tests|integration|docs|examples|\.ci)/[\w./-]*)`", prose(page))
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_readme_is_short_and_leads_to_every_page() -> None:
    readme = PAGES[0]
    assert len(readme.read_text(encoding="utf-8").splitlines()) <= MOST_LINES_OF_README
    linked = {path for path, _ in links(readme)}
    assert [name_of(page) for page in PAGES[1:] if name_of(page) not in linked] == []
