"""A command of the package, in processes that stay sharded on a CPU."""

import os
import sys

from accelerate_on_cpu import keep_sharding_on_cpu


keep_sharding_on_cpu()

from hf_descent import cli  # noqa: E402


cli.main(sys.argv[1:])
# Torch's threads can abort the interpreter's end, as in `train_steps.py`.
os._exit(0)
