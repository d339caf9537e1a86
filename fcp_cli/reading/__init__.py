"""What others wrote, read with bounds: JSON and YAML, Parquet footers, tars. Every failure is one line."""
