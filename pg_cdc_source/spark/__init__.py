"""The edge to Spark: the two data sources, and what users call on DataFrames."""
