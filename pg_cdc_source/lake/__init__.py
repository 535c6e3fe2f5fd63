"""Tables in a lake that are kept as PostgreSQL has them, all at one LSN. Nothing here knows Spark.

- Rows: ``tasks`` gives each table its rows of a batch. ``table_batch`` finds what counts of them (``rows_of_batch``,
  ``schema_changes``), ``last_layout`` brings runs from the layouts of their time into the last one (``columns``,
  ``kept_columns``), and ``unfollowed`` refuses what the lake cannot follow. ``parts`` puts them into commits, and
  ``states``, ``versions`` and ``final_rows`` are what a commit writes of a ``segment``, by what the table keeps
  (``shape``, ``shape_of_table``).
- Commits: ``bring`` takes one table to the end of a batch, whichever of its commits are there. ``key_bounds`` keeps
  files without the batch's keys from being read, ``compaction`` says when small files are put together.
- First rows: ``first_rows`` writes them in the task that reads them, by ``files`` and ``first_files``. ``directories``
  knows file systems and object stores.
- All tables: ``targets`` says where each one is, ``sink`` applies batches in order and ends each with a row of the
  ``ledger``, and ``standing`` says where tables stand and which are set aside.
"""
