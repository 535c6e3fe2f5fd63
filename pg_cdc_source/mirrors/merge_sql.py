"""What Spark's MERGE INTO does with a batch's rows, ``s``, and those of the lake's table, ``t``."""

from __future__ import annotations

from collections.abc import Sequence

from pg_cdc_source.lake.shape import VALID_FROM, VALID_TO, VALID_TO_TS, Shape
from pg_cdc_source.lake.states import DROPPED, IS_DELETE, kept_name
from pg_cdc_source.mirrors.catalog_names import backquoted
from pg_cdc_source.mirrors.staging import StagedSegment

# A state that was never there from one commit to the next goes, as where a large commit is cut.
_ENDS = f"""
    WHEN MATCHED AND t.{VALID_FROM} = s.{VALID_TO} THEN DELETE
    WHEN MATCHED THEN UPDATE SET t.{VALID_TO} = s.{VALID_TO}, t.{VALID_TO_TS} = s.{VALID_TO_TS}
"""
# What begins later comes again, where rows came again as of a point that the table was past.
CUT = f"""
    ON t.{VALID_TO} IS NULL OR t.{VALID_TO} > s.{VALID_TO}
    WHEN MATCHED AND t.{VALID_FROM} >= s.{VALID_TO} THEN DELETE
    WHEN MATCHED THEN UPDATE SET t.{VALID_TO} = s.{VALID_TO}, t.{VALID_TO_TS} = s.{VALID_TO_TS}
"""


def same(name: str) -> str:
    """Return the condition that a column has one value on both sides."""
    return f"t.{backquoted(name)} = s.{backquoted(name)}"


def merged(segment: StagedSegment, in_file: Sequence[str], in_table: Sequence[str], shape: Shape) -> str:
    """Return the clauses by which a segment's final rows are merged, which have the columns ``in_file``."""
    names = [name for name in in_table if name in in_file]
    updated = in_table if DROPPED in segment.kept else names
    is_delete = f"s.{backquoted(IS_DELETE)}"

    def value(name: str) -> str:
        ours, theirs = f"t.{backquoted(name)}", f"s.{backquoted(name)}" if name in in_file else "NULL"
        place = in_file.index(name) if name in in_file else DROPPED
        if place in segment.kept:
            return f"CASE WHEN s.{backquoted(kept_name(place))} THEN {ours} ELSE {theirs} END"
        return theirs

    on = [same(name) for name in segment.key]
    on += [bounds.condition(f"t.{backquoted(bounds.column)}", literal) for bounds in segment.bounds]
    inserted = f"""
        WHEN NOT MATCHED AND NOT {is_delete} THEN INSERT ({", ".join(map(backquoted, names))})
            VALUES ({", ".join(f"s.{backquoted(name)}" for name in names)})
    """
    if shape.has_versions:
        return f"ON {' AND '.join(on)} AND t.{backquoted(VALID_TO)} IS NULL AND {is_delete} {_ENDS} {inserted}"
    # What a deleted row was last is not known where the row that is deleted once more has never come.
    condition = f" AND NOT ({is_delete} AND t.{backquoted(shape.deleted)})" if shape.is_soft else ""
    return f"""
        ON {" AND ".join(on)}
        {"" if shape.is_soft else f"WHEN MATCHED AND {is_delete} THEN DELETE"}
        WHEN MATCHED{condition} THEN UPDATE SET {", ".join(f"t.{backquoted(name)} = {value(name)}" for name in updated)}
        {inserted}
    """


def literal(value: str | int) -> str:
    """Return a value as SQL has it."""
    if isinstance(value, int):
        return str(value)
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
