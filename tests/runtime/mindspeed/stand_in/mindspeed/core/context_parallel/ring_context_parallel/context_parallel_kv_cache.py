"""Which layers keep keys and values for backward; this stand-in keeps none."""


def get_cache_policy(layer_number: int, cache_policy_init: str | None, cache_interval: int) -> str | None:
    return cache_policy_init
