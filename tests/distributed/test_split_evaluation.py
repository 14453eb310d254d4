"""Two processes that share the batches of an evaluation find what one finds alone."""

import os
import socket

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from tiny.data import classification_data
from tiny.models import bert
from tiny.training import config

from hf_descent import DescentTrainer
from hf_descent.evaluation import layer_profiles, noise_curve


def measure(rows, **settings):
    """Of data whose last batch, or second process, has little to do."""
    curve = noise_curve(bert(), rows, [0.0, 1.0], batch_size=8, **settings)
    profiles = layer_profiles(bert(), rows, [0.0, 1.0], batch_size=8, **settings)
    return [curve.losses, curve.values, *(p.losses for p in profiles)]


def plain_layers(folder, batch_size):
    """Of plain training, by `evaluate`, whose last batch is filled up by repeated rows on two processes."""
    args = config(folder, objective="erm", per_device_eval_batch_size=batch_size)
    metrics = DescentTrainer(bert(), args, eval_dataset=classification_data(21)).evaluate()
    return np.array([metrics[f"eval_layer_loss_{layer}"] for layer in (1, 2, 3)])


def work(rank, port, folder):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    for count in (20, 8):
        found = measure(classification_data(count), accelerator=accelerator)
        np.savez(folder / f"{count}-{rank}.npz", *found)
    np.save(folder / f"plain-{rank}.npy", plain_layers(folder, 4))
    accelerator.end_training()


@pytest.mark.slow
def test_the_number_of_processes_does_not_matter(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    torch.multiprocessing.spawn(work, (port, tmp_path), nprocs=2)

    for rank in (0, 1):
        np.testing.assert_allclose(
            np.load(tmp_path / f"plain-{rank}.npy"), plain_layers(tmp_path, 8), rtol=1e-6
        )
    for count in (20, 8):
        alone = measure(classification_data(count))
        for rank in (0, 1):
            shared = np.load(tmp_path / f"{count}-{rank}.npz")
            for name, expected in zip(shared.files, alone, strict=True):
                np.testing.assert_allclose(shared[name], expected, rtol=1e-6)
