"""Settings of all tests."""

import os

from hypothesis import HealthCheck, settings

# Read when TensorFlow is imported. Numbers and kernels that do not depend on the CPU; also, see sparsekit/onednn.py, no
# crash of TensorFlow's own.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

# The same examples on each run, and no limit in milliseconds: a busy machine must not fail a test.
settings.register_profile(
    "sparsekit", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], max_examples=80
)
settings.load_profile("sparsekit")
