"""The lake's formats, and the query that keeps tables in one of them equal to PostgreSQL's.

- The query: ``query`` has ``mirror`` and ``mirror_at``, ``batches`` is what Spark calls with each batch, ``sessions``
  what is asked of classic sessions and of Spark Connect, and ``lakes`` what each format has to do.
- ``deltalake``: ``delta_rs_lake`` has tasks merge (``delta_rs``, ``delta_rs_columns``), find a batch in a table's
  commits (``delta_rs_commits``) and keep its log short (``delta_rs_log``). ``delta_rs_ledger`` is the ledger.
- ``delta`` and ``iceberg``: ``spark_lake`` has tasks stage a batch (``staging``, ``fetching``), and Spark's MERGE INTO
  take it, as ``merge_sql`` says, tables side by side. ``spark_table`` is what both have in common, with
  ``spark_commits`` and ``column_changes``; ``delta``, ``iceberg``, ``iceberg_of_jvm`` and ``iceberg_files`` are what
  differs; ``spark_ledger`` is the ledger. ``catalog_names`` and ``catalog_tables`` read and write what catalogs say.
"""
