"""Turns a plan into a running job.

`request` defines the options; `resolve` builds a `Job` from them, and `checks` finds what is wrong with it. A job runs
here under `supervise`, or is written as the files of one of the `targets`, whose nodes start `node`.
"""
