"""The README says what the code does."""

from __future__ import annotations

import re

import readme_tables


def test_tables_are_those_of_the_code() -> None:
    text = readme_tables.README.read_text()
    assert readme_tables.with_tables(text) == text, "run: python tests/helpers/readme_tables.py"


def test_python_examples_compile() -> None:
    examples = re.findall(r"```python\n(.*?)```", readme_tables.README.read_text(), flags=re.DOTALL)
    assert examples
    for example in examples:
        compile(example, "README.md", "exec")
