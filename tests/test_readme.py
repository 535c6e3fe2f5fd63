"""The README says what the code does."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

_PATH = Path(__file__).with_name("readme_tables.py")
_SPEC = importlib.util.spec_from_file_location("readme_tables", _PATH)
assert _SPEC is not None
assert _SPEC.loader is not None
readme_tables = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(readme_tables)


def test_tables_are_those_of_the_code() -> None:
    text = readme_tables.README.read_text()
    assert readme_tables.with_tables(text) == text, "run: python tests/readme_tables.py"


def test_python_examples_compile() -> None:
    examples = re.findall(r"```python\n(.*?)```", readme_tables.README.read_text(), flags=re.DOTALL)
    assert examples
    for example in examples:
        compile(example, "README.md", "exec")
