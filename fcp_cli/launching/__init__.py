"""From a plan to a running job.

`request` holds the typed options; `resolve` makes one `Job` of it (`job/`), after the checks (`checks/`). A job runs
here under `supervision/`, or is written as the files of one of the `targets/`, whose nodes start `node`.
"""
