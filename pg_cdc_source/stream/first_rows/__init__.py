"""The rows of whole tables as of a consistent point.

``batch_rows`` says which tables' rows a batch has. ``held_snapshot`` cuts them into ranges while the snapshot of that
point lasts. Where it was lost, ``rewind`` reads the slot from there, ``changed_rows`` folds what it brought, and
``rewound`` turns the rows of a later snapshot back.
"""
