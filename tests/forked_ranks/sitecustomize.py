"""Have fcp, torchrun, its ranks and their planners forked, if that is what this interpreter runs; see `tests.forked_ranks`."""

import os
import sys
from importlib import import_module

words = sys.orig_argv[1:] or [""]
if words[:1] == ["-m"] or words[0].endswith("/bin/fcp"):
    words = words[1:] if words[0] == "-m" else ["fcp_cli", *words[1:]]
    # A rank of a script that torchrun does not start, if its job asks for that.
    script = words[0] == "fcp_cli.runtime" and "FCP_TESTS_FORK_SCRIPTS" in os.environ
    if script or words[0] in ("fcp_cli", "fcp_cli.planning", "torch.distributed.run"):
        rank_forking = import_module("rank_forking")  # this folder is on the path, and need not be a package there
        rank_forking.go_on_forked(words)
        if words[0] == "torch.distributed.run":
            rank_forking.fork_ranks()
