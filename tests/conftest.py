import os

import pytest
import torch

from hf_descent.models import unrolling


# No test may reach the network or a tracker.
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", WANDB_MODE="disabled", TOKENIZERS_PARALLELISM="false")


@pytest.fixture(autouse=True)
def _few_threads():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def evaluate_modules(tmp_path_factory):
    """A folder for the code of metrics; one for all tests, since python keeps the package that it first imports."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("evaluate.config.HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        yield


@pytest.fixture
def explicit_calls(monkeypatch):
    """What the explicit attention of the unrolled transformers returned, one entry per call."""
    calls, function = [], unrolling.explicit_symmetric_attention

    def counting(*args, **kwargs):
        calls.append(function(*args, **kwargs))
        return calls[-1]

    monkeypatch.setattr(unrolling, "explicit_symmetric_attention", counting)
    return calls
