"""What a lake's table gets of a segment, by what the table keeps."""

from __future__ import annotations

from pg_cdc_source.lake.segment import CHANGE_NAMES, Segment
from pg_cdc_source.lake.shape import Shape
from pg_cdc_source.lake.states import Fetch, States, states_of
from pg_cdc_source.lake.versions import versions_of


def final_rows(segment: Segment, fetch: Fetch, shape: Shape) -> States:
    """Return the rows for a merge; of a log, those that are appended, without a key. Raises SchemaChangedError."""
    if shape.is_log:
        own = {padded: name for name, padded in CHANGE_NAMES.items()}
        rows = segment.rows.rename_columns([own.get(name, name) for name in segment.rows.column_names])
        return States((), False, rows, ())
    if shape.has_versions:
        return versions_of(segment, fetch)
    return states_of(segment, fetch, shape)
