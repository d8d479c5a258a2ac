"""Settings of all tests."""

from hypothesis import HealthCheck, settings

# The same examples on each run, and no limit in milliseconds: a busy machine must not fail a test.
settings.register_profile(
    "sparsekit", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], max_examples=80
)
settings.load_profile("sparsekit")
