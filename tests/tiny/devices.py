"""Where tests compute."""

import os

import torch


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# Most tests stay on the CPU. `recipes/benchmarks/gpu.py` runs some of them on the device.
TEST_DEVICE = DEVICE if "TESTS_ON_DEVICE" in os.environ else "cpu"
