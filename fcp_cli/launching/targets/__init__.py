"""The targets that a job can be written for: files made from one value, by templates that a site may replace."""
