"""Where a job can run beside this machine: files made from one value, by templates that a site may replace."""
