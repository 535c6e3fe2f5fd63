"""The states of each row of a segment, one for each commit that changed it, as a merge takes them.

The last rows of a key in each commit are its states. Each is there from its commit up to the next one that has the key.
The state that the lake's table has, if it has one, ends with the first of them: a row of its own says so, whose
``IS_DELETE`` is true. It has nothing but the key and where the state ends.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from pg_cdc_source.lake.segment import COMMIT_TS, LSN, UNCHANGED, Segment
from pg_cdc_source.lake.shape import VALID_FROM, VALID_FROM_TS, VALID_TO, VALID_TO_TS
from pg_cdc_source.lake.states import IS_DELETE, ChangesByKey, Fetch, States, taken, unchanged_flags, values_of_last
from pg_cdc_source.values.arrow import from_numpy


def versions_of(segment: Segment, fetch: Fetch) -> States:
    """Return the states of a segment's rows, and where those end that the lake's table has.

    ``fetch`` gives the latter. Raises SchemaChangedError where a value is nowhere.
    """
    changes = ChangesByKey.of(segment, by_commit=True)
    unchanged = unchanged_flags(segment.rows[UNCHANGED])
    wanted = {name: flags & ~changes.is_delete for name, flags in unchanged.items()}
    values, _ = values_of_last(segment, changes, unchanged, wanted, fetch, keeps=False)
    n, keys = len(changes.last), changes.keys[changes.last]
    at = segment.rows.select([LSN, COMMIT_TS]).take(from_numpy(changes.last))
    order = np.argsort(keys, kind="stable")
    has_next = keys[order[:-1]] == keys[order[1:]]
    then, is_first = np.full(n, -1), np.ones(n, np.bool_)
    then[order[:-1][has_next]] = order[1:][has_next]
    is_first[order[1:][has_next]] = False
    ends = at.take(pa.array(then, mask=then < 0))
    is_there = ~changes.is_delete[changes.last]
    there = from_numpy(np.flatnonzero(is_there))
    # Not take(), which writes all values together: of texts, there may be more than the 2 GB that one array can have.
    states = _rows(values.filter(from_numpy(is_there)), at.take(there), ends.take(there), is_end=False)
    first = from_numpy(np.flatnonzero(is_first))
    nothing = pa.Table.from_arrays([pa.nulls(len(first), kind) for kind in values.schema.types], schema=values.schema)
    for name in segment.key:
        place = values.column_names.index(name)
        nothing = nothing.set_column(place, values.schema.field(name), taken(values[name], np.flatnonzero(is_first)))
    nowhere = pa.Table.from_arrays([pa.nulls(len(first), kind) for kind in at.schema.types], schema=at.schema)
    closed = _rows(nothing, nowhere, at.take(first), is_end=True)
    return States(segment.key, False, pa.concat_tables([closed, states]), ())


def _rows(values: pa.Table, begins: pa.Table, ends: pa.Table, *, is_end: bool) -> pa.Table:
    own = ((VALID_FROM, begins[LSN]), (VALID_TO, ends[LSN]))
    of_times = ((VALID_FROM_TS, begins[COMMIT_TS]), (VALID_TO_TS, ends[COMMIT_TS]))
    for name, column in (*own, *of_times, (IS_DELETE, pa.repeat(is_end, values.num_rows))):
        values = values.append_column(name, column)
    return values
