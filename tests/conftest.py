"""How properties are tested: with the same examples each time, however slow the machine is at the moment.

`HYPOTHESIS_PROFILE=search python -m pytest ...` looks for examples that nobody has seen yet.
"""

import os
import signal

from hypothesis import HealthCheck, settings

settings.register_profile("repeatable", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("search", settings.get_profile("repeatable"), derandomize=False, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

# A shell has what it starts in the background ignore Ctrl-C, and so would every process that a test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
