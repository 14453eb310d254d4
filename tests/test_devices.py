"""Training and measuring on a GPU where there is one; elsewhere on an accelerator that is made up
(`pretend_accelerator`), or on the CPU."""

import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest
import torch
from accelerate import dispatch_model
from naive_head import Watch
from tiny.data import classification_data, language_data
from tiny.devices import DEVICE
from tiny.models import bert, llama
from tiny.training import config, trained
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainerCallback
from transformers.utils.import_utils import is_torch_greater_or_equal

from hf_descent import DescentConfig, DescentTrainer
from hf_descent.constraints import objectives, state
from hf_descent.constraints.transfer import HostCopy, on_device
from hf_descent.early_exit import ConfidenceExit, exit_profile


ON_GPU = DEVICE == "cuda"
ACCELERATOR = "cuda" if ON_GPU else "pretend"
RUNS = {
    "replay": {"noise_gamma": [0.0, 1.0], "activation_checkpointing": True},
    "tiled head": {"noise_gamma": 1.0, "gradient_accumulation_steps": 2},
    "sampled tokens": {"readout_token_fraction": 0.5, "objective": "hinge"},
    "mean of tokens": {},
    "held-out rows": {"dual_warmup_steps": 0, "initial_loss_bound": 4.0, "dual_learning_rate": 0.1},
}
FIRST = (
    "model.embed_tokens",
    "model.rotary_emb",
    "model.layers.0",
    "bert.embeddings",
    "bert.encoder.layer.0",
)
LAST = (
    "model.layers.1",
    "model.layers.2",
    "model.norm",
    "lm_head",
    "bert.encoder.layer.1",
    "bert.encoder.layer.2",
)
LAST += ("bert.pooler", "dropout", "classifier")
SPREAD = dict.fromkeys(FIRST, "cpu") | dict.fromkeys(LAST, f"{ACCELERATOR}:0")
SETTINGS = {
    "max_steps": 4,
    "per_device_train_batch_size": 4,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
}


def numbers(kind, arguments, device, spread=False):
    """What training and the measurements after it give; of a model on several devices, as `device_map="auto"` has it,
    where `spread`."""
    of_texts = kind in ("replay", "mean of tokens")
    model, data = (bert(), classification_data(48)) if of_texts else (llama(), language_data(48))
    if spread:
        model = dispatch_model(model, SPREAD, "cpu")
    more = {
        "held-out rows": {"dual_dataset": language_data(200, length=13)},
        "mean of tokens": {"readout": "mean"},
    }
    held_out = data[:16]  # few: on an accelerator in Python everything takes long
    keywords = {"train_dataset": data, "eval_dataset": held_out, **more.get(kind, {})}
    trainer = trained(model, arguments, **keywords)
    assert model.device.type == device
    metrics = trainer.evaluate()
    given = [
        trainer.multipliers.values.tolist(),
        [metrics[f"eval_layer_loss_{layer}"] for layer in (1, 2, 3)],
    ]
    levels = [0.0] if ON_GPU else [0.0, 1.0]  # a GPU has random numbers of its own
    given += [
        trainer.evaluate_robustness(gammas=levels).losses,
        trainer.evaluate_layers(gamma=levels[-1]).losses,
    ]
    if kind == "replay":
        report = ConfidenceExit(model).calibrate(held_out, max_loss=0.1).evaluate(held_out)
        profile = exit_profile(model, held_out, repeats=1)
        given += [report.accuracy, report.exit_shares, profile.values]
    return [np.asarray(value) for value in given]


def both(kind, folder, spread):
    """The numbers on the CPU and on the accelerator, or on both of them."""
    settings = {"output_dir": folder, **SETTINGS, **RUNS[kind]}
    there, on_accelerator = settings, DescentConfig
    if ON_GPU:
        settings["noise_gamma"] = 0.0
        there = settings | {"use_cpu": False}
    else:
        import pretend_accelerator

        class on_accelerator(pretend_accelerator.OnAccelerator, DescentConfig):
            pass

    on_cpu = numbers(kind, DescentConfig(**settings), "cpu")
    if spread:
        return on_cpu, numbers(kind, DescentConfig(**settings), "cpu", spread)
    return on_cpu, numbers(kind, on_accelerator(**there), ACCELERATOR)


@pytest.fixture(scope="module")
def child():
    """A process that keeps the device to itself."""
    with ProcessPoolExecutor(1, get_context("spawn"), torch.set_num_threads, (1,)) as executor:
        yield executor


@pytest.mark.skipif(
    not (ON_GPU or is_torch_greater_or_equal("2.13")), reason="devices in Python are an experiment"
)
@pytest.mark.parametrize(
    ("kind", "spread"),
    [
        *((kind, kind == "mean of tokens") for kind in RUNS),
        ("tiled head", True),
        pytest.param("sampled tokens", True, marks=pytest.mark.slow),
    ],
)
def test_an_accelerator_gives_the_numbers_of_the_cpu(kind, spread, child, tmp_path):
    on_cpu, there = child.submit(both, kind, str(tmp_path), spread).result(timeout=300)
    for expected, value in zip(on_cpu, there, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-3 if ON_GPU else 1e-5)


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
@pytest.mark.parametrize(
    ("make", "data"), [(bert, classification_data()), (llama, language_data())]
)
def test_steps_that_the_scaler_of_float16_skips_are_none_of_the_multipliers(
    make, data, optim, tmp_path
):
    settings = {"max_steps": 40, "max_grad_norm": float(ON_GPU), "optim": optim}
    args = config(tmp_path, use_cpu=not ON_GPU, fp16=ON_GPU, **settings)
    trainer = DescentTrainer(make(), args, train_dataset=data)
    # Too much at first, for float16 or, on a CPU, for float32.
    trainer.accelerator.scaler = torch.amp.GradScaler(
        *(("cuda", 2.0**32) if ON_GPU else ("cpu", 2.0**90))
    )
    trainer.train()
    (taken,) = {state["step"].item() for state in trainer.optimizer.state.values()}
    assert 0 < taken < 40 and trainer.multipliers.steps == taken
    assert (trainer.multipliers.values > 0).any() and all(
        p.isfinite().all() for p in trainer.model.parameters()
    )


def test_numbers_arrive_on_the_host_and_on_the_device_as_they_were_sent(tmp_path, monkeypatch):
    """What the multipliers move on is what the device had, and what weighs the losses is what the host had, without
    a wait between the two: on a GPU both ways are asynchronous."""
    arrivals = []
    departures = []

    class Watched(HostCopy):
        def __init__(self, tensor):
            self.sent = tensor.detach().float().clone()  # on the device: does not wait
            super().__init__(tensor)

        def numbers(self):
            arrived = super().numbers()
            arrivals.append((self.sent, arrived.copy()))
            return arrived

    def send(values, device):
        sent = np.array(values, copy=True)
        arrived = on_device(values, device)
        departures.append((sent, arrived.clone()))
        return arrived

    monkeypatch.setattr(state, "HostCopy", Watched)
    monkeypatch.setattr(objectives, "on_device", send)
    for make, data in ((bert, classification_data()), (llama, language_data())):
        args = config(tmp_path, use_cpu=not ON_GPU, max_steps=30, logging_strategy="no")
        trainer = DescentTrainer(make(), args, train_dataset=data)
        trainer.train()
        assert (trainer.multipliers.values > 0).any()

    assert len(arrivals) == 60
    assert len(departures) >= 60
    for on_the_device, on_the_host in arrivals:
        np.testing.assert_array_equal(on_the_device.cpu().numpy(), on_the_host)
    for on_the_host, on_the_device in departures:
        np.testing.assert_array_equal(on_the_device.cpu().numpy(), on_the_host.astype(np.float32))


def waits(trainer):
    """How often a step of training waits for the device."""
    seen, watch = [], Watch()

    class Look(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            warned = sum("synchronizing CUDA" in str(warning.message) for warning in caught)
            seen.append(warned if ON_GPU else watch.waits)

        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 8

    trainer.add_callback(Look())
    torch.use_deterministic_algorithms(False)
    with warnings.catch_warnings(record=True) as caught, watch:
        warnings.simplefilter("always")
        set_mode = torch.cuda.set_sync_debug_mode if ON_GPU else str
        set_mode("warn")
        trainer.train()
        set_mode("default")
    return (seen[7] - seen[3]) / 4


@pytest.mark.parametrize(
    ("make", "data", "more"), [(bert, classification_data(), 0), (llama, language_data(), 1)]
)
def test_a_step_waits_for_the_device_no_more_often_than_trainers(make, data, more, tmp_path):
    """Whatever the number of layers; tiles find the labelled tokens in addition."""
    args = config(
        tmp_path, use_cpu=not ON_GPU, logging_strategy="no", max_steps=1000
    )  # no look at progress
    stock, *ours = (
        waits(trainer_class(make(layers), args, train_dataset=data))
        for trainer_class, layers in ((Trainer, 3), (DescentTrainer, 3), (DescentTrainer, 6))
    )
    assert ours[0] == ours[1] <= stock + more + ON_GPU  # to which the number of items is copied


def test_adapters_of_quantised_weights_are_trained(tmp_path):
    """Also on CPUs on which bitsandbytes packs weights in eval mode, for a product without gradients."""
    pytest.importorskip("bitsandbytes")
    from peft import LoraConfig, get_peft_model

    llama(hidden_size=64, intermediate_size=64).save_pretrained(tmp_path / "base")
    quantised = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
    given = {"quantization_config": quantised, "device_map": {"": 0 if ON_GPU else "cpu"}}
    settings = {"bf16": True, "readout_token_fraction": 0.5, "max_steps": 12}
    found = []
    for whole in (False, True):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", **given)
        torch.manual_seed(0)  # of the adapters
        adapters = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
        adapted = get_peft_model(model.dequantize() if whole else model, adapters)
        assert whole == all(weight.is_floating_point() for weight in adapted.parameters())
        trainer = trained(
            adapted, config(tmp_path, use_cpu=not ON_GPU, **settings), train_dataset=language_data()
        )
        metrics = trainer.evaluate(language_data())
        assert (trainer.multipliers.values > 0).any()
        assert all(np.isfinite(metrics[f"eval_layer_loss_{layer}"]) for layer in (1, 2, 3))
        losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        found.append([*losses, *(metrics[f"eval_layer_loss_{layer}"] for layer in (1, 2, 3))])
    assert found[0] == pytest.approx(found[1], rel=2e-3) and losses[-1] < 0.98 * losses[0]
