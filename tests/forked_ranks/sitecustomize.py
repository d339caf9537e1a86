"""Make torchrun fork its ranks, if that is what this interpreter runs; see `tests.forked_ranks`."""

import sys
from importlib import import_module

if "-m torch.distributed.run" in " ".join(sys.orig_argv):
    rank_forking = import_module("rank_forking")  # this folder is on the path, and need not be a package there
    rank_forking.fork_agent()
    rank_forking.fork_ranks()
