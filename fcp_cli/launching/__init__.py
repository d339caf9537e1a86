"""Turns a plan into a running job.

`request` defines the options; `resolve` builds a `Job` (`job/`) and runs checks (`checks/`). A job runs here under
`supervision/`, or is written as files of a target (`targets/`), whose nodes start `node`.
"""
