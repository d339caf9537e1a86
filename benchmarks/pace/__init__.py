"""Ranks that take an accelerator's time and compute nothing: ranks of one machine then lend each other no cores.

`make pace` runs plans on them: docs/research/paced.md.
"""
