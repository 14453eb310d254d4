"""Training and measuring on an accelerator, as far as a machine without one can tell: see `pretend_accelerator`."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest
import torch
from accelerate import dispatch_model
from tiny import bert, classification_data, language_data, llama
from transformers.utils.import_utils import is_torch_greater_or_equal

from hf_descent import DescentConfig, DescentTrainer
from hf_descent.early_exit import ConfidenceExit, exit_profile


RUNS = {
    "replay": {"noise_gamma": [0.0, 1.0], "activation_checkpointing": True},
    "tiled head": {"noise_gamma": 1.0, "gradient_accumulation_steps": 2},
    "sampled tokens": {"readout_token_fraction": 0.5, "objective": "hinge"},
}
SPREAD = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.layers.0"), "cpu")
SPREAD |= dict.fromkeys(("model.layers.1", "model.layers.2", "model.norm", "lm_head"), "pretend:0")
SETTINGS = {"max_steps": 6, "per_device_train_batch_size": 4, "save_strategy": "no", "report_to": [], "use_cpu": True}


def numbers(kind, arguments, device, spread=False):
    """What training and the measurements after it give; of a model on several devices, as `device_map="auto"` has it,
    where `spread`."""
    model, data = (bert(), classification_data(48)) if kind == "replay" else (llama(), language_data(48))
    if spread:
        model = dispatch_model(model, SPREAD, "cpu")
    trainer = DescentTrainer(model, arguments, train_dataset=data, eval_dataset=data)
    trainer.train()
    assert model.device.type == device
    metrics = trainer.evaluate()
    given = [trainer.multipliers.values.tolist(), [metrics[f"eval_layer_loss_{layer}"] for layer in (1, 2, 3)]]
    given += [trainer.evaluate_robustness(gammas=[0.0, 1.0]).losses, trainer.evaluate_layers(gamma=1.0).losses]
    if kind == "replay":
        report = ConfidenceExit(model).calibrate(data, max_loss=0.1).evaluate(data)
        given += [report.accuracy, report.exit_shares, exit_profile(model, data, repeats=1).values]
    return [np.asarray(value) for value in given]


def both(kind, folder, spread):
    """The numbers on the CPU and on the accelerator, or on both of them."""
    import pretend_accelerator

    class OnAccelerator(pretend_accelerator.OnAccelerator, DescentConfig):
        pass

    settings = {"output_dir": folder, **SETTINGS, **RUNS[kind]}
    on_cpu = numbers(kind, DescentConfig(**settings), "cpu")
    if spread:
        return on_cpu, numbers(kind, DescentConfig(**settings), "cpu", spread)
    return on_cpu, numbers(kind, OnAccelerator(**settings), "pretend")


@pytest.fixture(scope="module")
def child():
    """A process that keeps the device to itself."""
    with ProcessPoolExecutor(1, get_context("spawn"), torch.set_num_threads, (1,)) as executor:
        yield executor


@pytest.mark.skipif(not is_torch_greater_or_equal("2.13"), reason="devices in Python are an experiment of torch")
@pytest.mark.parametrize(
    ("kind", "spread"), [*((kind, False) for kind in RUNS), ("tiled head", True), ("sampled tokens", True)]
)
def test_an_accelerator_gives_the_numbers_of_the_cpu(kind, spread, child, tmp_path):
    on_cpu, there = child.submit(both, kind, str(tmp_path), spread).result(timeout=300)
    for expected, value in zip(on_cpu, there, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5)
