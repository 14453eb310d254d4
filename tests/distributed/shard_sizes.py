"""The bytes that the first of several processes holds in an optimizer step under FSDP2."""

import json
import os
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parent.parent))
from accelerate_on_cpu import keep_sharding_on_cpu
from tiny import config, language_data, llama
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from hf_descent import DescentTrainer


keep_sharding_on_cpu()
ODD = 41  # rows of the table and the head, which two processes cannot share evenly


def local(tensors):
    return sum(tensor.to_local().nbytes for tensor in tensors if isinstance(tensor, DTensor))


class Sizes(TrainerCallback):
    def on_optimizer_step(self, args, state, control, model=None, optimizer=None, **kwargs):
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.sizes = {
            "weights": local(parameters),
            "gradients": local(parameter.grad for parameter in parameters),
            "optimizer": local(value for values in optimizer.state.values() for value in values.values()),
        }


def main(folder):
    sizes = Sizes()
    args = config(folder, max_steps=1, optim="adamw_torch_fused")
    model, rows = llama(vocab_size=ODD), language_data(16)
    DescentTrainer(model, args, train_dataset=rows, callbacks=[sizes]).train()
    if args.process_index == 0:
        (folder / "sizes.json").write_text(json.dumps(sizes.sizes))
    os._exit(0)  # as in `train_steps.py`


if __name__ == "__main__":
    main(Path(sys.argv[1]))
