import os

import pytest
import torch


# No test may reach the network or a tracker.
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", WANDB_MODE="disabled", TOKENIZERS_PARALLELISM="false")


@pytest.fixture(autouse=True)
def _few_threads():
    torch.set_num_threads(1)
