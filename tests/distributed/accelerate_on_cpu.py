"""Makes accelerate keep FSDP and DeepSpeed on a CPU, where it would silently run DDP; the rest is its own code."""

import os

from accelerate.state import PartialState
from accelerate.utils import DistributedType


def keep_sharding_on_cpu():
    if "true" not in (
        os.environ.get("ACCELERATE_USE_FSDP"),
        os.environ.get("ACCELERATE_USE_DEEPSPEED"),
    ):
        return
    init = PartialState.__init__

    def init_as_on_gpu(self, cpu=False, **kwargs):
        init(self, cpu, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = init_as_on_gpu
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        import deepspeed

        # Its collectives over shared memory would be compiled at the start; without them it takes gloo's.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
