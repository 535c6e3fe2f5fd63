"""How rows are understood that were written with other columns than their table has now.

``schema_history`` decides it for each commit by the relation that came with it. With ``onSchemaChange=emit`` the
offsets carry the tables' layouts (``layout_history``), and ``emitted_layouts`` has the rows that say each change:
from what came, from the catalog where nothing came since an ALTER TABLE (``altered_tables``, ``catalog_layouts``), or
guessed for the end of a batch that is not here yet (``guessed_layouts``).
"""
