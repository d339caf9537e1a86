"""How properties are tested: with the same examples each time, however slow the machine is at the moment.

`HYPOTHESIS_PROFILE=search python -m pytest ...` looks for examples that nobody has seen yet.
"""

import os

from hypothesis import HealthCheck, settings

settings.register_profile("repeatable", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("search", settings.get_profile("repeatable"), derandomize=False, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
