"""The Parquet file of a plan: schema, writer, reader and the messages of a planner process."""
