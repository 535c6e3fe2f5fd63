"""What is logged where: the variable that turns lines on, and the form that they have."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from pg_cdc_source.logs import fields

LINES = """
import logging
import pg_cdc_source
for name in ("stream.batch_log", "snapshot.reader"):
    log = logging.getLogger("pg_cdc_source." + name)
    log.debug("debug")
    log.info("info")
    log.warning("warning")
"""


def printed(code: str, level: str | None) -> list[str]:
    """What a process writes to standard error that nobody has configured, with this level in its environment."""
    environment = {key: value for key, value in os.environ.items() if key != "PG_CDC_LOG"}
    if level is not None:
        environment["PG_CDC_LOG"] = level
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout == ""
    return result.stderr.splitlines()


@pytest.mark.parametrize(
    ("level", "texts"), [("debug", ["debug", "info", "warning"]), ("INFO", ["info", "warning"]), ("ERROR", [])]
)
def test_the_variable_turns_levels_on_for_both_formats(level: str, texts: list[str]) -> None:
    expected = [
        f"{text.upper()} pg_cdc_source.{name}: {text}"
        for name in ("stream.batch_log", "snapshot.reader")
        for text in texts
    ]
    lines = printed(LINES, level)
    assert [re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ", "", line) for line in lines] == expected
    assert [line for line in lines if not line.startswith("20")] == []


def test_without_it_warnings_come_as_python_prints_them() -> None:
    assert printed(LINES, None) == ["warning", "warning"]


def test_a_level_that_does_not_exist_is_named() -> None:
    first, *rest = printed(LINES, "chatty")
    assert "PG_CDC_LOG=CHATTY is none of DEBUG, INFO, WARNING, ERROR" in first
    assert [line.rpartition(" ")[2] for line in rest] == ["warning", "warning"]


def test_who_configures_logging_gets_each_line_once() -> None:
    configured = "import logging\nlogging.basicConfig(format='mine: %(message)s')" + LINES
    assert printed(configured, "INFO") == ["mine: info", "mine: warning"] * 2


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("0/1A2B", "key=0/1A2B"),
        (12, "key=12"),
        (0.25, "key=0.250"),
        (None, ""),
        ("", 'key=""'),
        ("public.orders:12,public.items:3", "key=public.orders:12,public.items:3"),
        ('public."My Table"', r'key="public.\"My Table\""'),
        ("a=b", 'key="a=b"'),
        ("a\nb", r'key="a\nb"'),
        ("größe", "key=größe"),
    ],
)
def test_fields_can_be_told_apart(value: object, text: str) -> None:
    assert fields(key=value) == text
