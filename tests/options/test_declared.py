from __future__ import annotations

from typing import get_args

import pytest
from readme_tables import option_table

from pg_cdc_source.options.declared import OPTIONS, Group


@pytest.mark.parametrize("group", get_args(Group))
def test_the_documentation_has_a_row_for_every_option(group: Group) -> None:
    lines = option_table(group).splitlines()
    assert lines[:2] == ["| option | meaning | default |", "| --- | --- | --- |"]
    assert [line.split("`")[1] for line in lines[2:]] == [o.name for o in OPTIONS if o.group == group]
    assert all(line.count("|") == 4 for line in lines)


@pytest.mark.parametrize("read_by", ["pgsnapshot", "pgcdc"])
def test_names_are_unique_within_what_one_format_reads(read_by: str) -> None:
    names = [option.name.lower() for option in OPTIONS if option.group in ("connection", read_by)]
    assert len(set(names)) == len(names)
    assert len(names) > 10
    assert names.count("slot") == 1


def test_a_name_that_both_formats_read_is_read_alike() -> None:
    of_snapshots = {option.name: option for option in OPTIONS if option.group == "pgsnapshot"}
    shared = [option for option in OPTIONS if option.group == "pgcdc" and option.name in of_snapshots]
    assert len(shared) == 7
    for option in shared:
        assert option.default == of_snapshots[option.name].default
        if option.name != "dbtable":
            assert option.parse is of_snapshots[option.name].parse
