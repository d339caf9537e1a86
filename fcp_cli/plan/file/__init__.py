"""The Parquet file of a plan: schema, writer, reader, parts and the messages of a planner process."""
