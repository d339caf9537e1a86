"""Make torchrun fork its ranks, if that is what this interpreter runs; see `tests.forked_ranks`."""

import sys
from importlib import import_module

if "torch.distributed.run" in sys.orig_argv:
    import_module("rank_forking").fork_ranks()  # this folder is on the path, and need not be a package there
