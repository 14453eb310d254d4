import gc
import logging
import os
import shutil
import tempfile


# No test may reach the network, a tracker or what a user's programs keep.
os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    WANDB_MODE="disabled",
    TOKENIZERS_PARALLELISM="false",
)
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="hf_descent_tests_")
os.environ["OMP_NUM_THREADS"] = (
    "1"  # of the processes that tests start: pytest's workers take all cores
)

import pytest
import torch
import torch.utils.data._utils
import transformers.utils.logging  # noqa: F401  (gives loggers their `warning_once`)
from accelerate.logging import MultiProcessAdapter


os.chdir(
    f"{os.path.dirname(os.path.abspath(__file__))}/.."
)  # from where recipes and documentation name their files

# Persistent workers that garbage collection ends are never told so, and are waited for this long, in seconds.
torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.5


def pytest_unconfigure():
    shutil.rmtree(os.environ["HF_HOME"], ignore_errors=True)


@pytest.fixture(autouse=True, scope="module")
def _small_heap():
    """Keeps what was imported so far out of the collections of garbage: Trainer asks for one in every run."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _few_threads():
    torch.set_num_threads(1)
    if "TESTS_ON_DEVICE" in os.environ:  # where runs are to be equal bit for bit
        torch.use_deterministic_algorithms(True, warn_only=True)


@pytest.fixture(autouse=True)
def _fresh_logger(monkeypatch):
    """Loggers as at the start of python: a training keeps the level that it sets, and what is said once is kept."""
    for said_once in (
        logging.Logger.warning_once,
        logging.Logger.info_once,
        MultiProcessAdapter.warning_once,
    ):
        said_once.cache_clear()
    logger = logging.getLogger("hf_descent")
    logger.setLevel(
        logging.NOTSET
    )  # which also forgets the levels that its children have looked up
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", True)


@pytest.fixture
def readouts(caplog):
    """readouts(): how the runs so far read their layers, "replay" or "tiles", by what they logged."""
    caplog.set_level(logging.INFO, "hf_descent.losses.layerwise")

    def said():
        lines = [record.getMessage() for record in caplog.records]
        return [
            "tiles" if "in tiles of" in line else "replay"
            for line in lines
            if line.startswith("Layers are read")
        ]

    return said
