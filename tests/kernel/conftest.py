"""Environment of the kernel's tests: quiet TensorFlow, and five logical CPU devices for sessions."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
