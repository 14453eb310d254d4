"""What happens to long runs: kills, preemption, full disks, spoilt files, numbers that are none."""

import gc
import json
import os
import re
import resource
import shutil
import signal
import time
from functools import partial

import psutil
import pytest
import torch
import torch.nn.functional as F
from programs import ROOT, python
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny.data import classification_data
from tiny.models import bert
from tiny.oracles import assert_equal_runs
from tiny.training import InOrder, config, fitted, trained
from transformers import TrainerCallback, trainer_jit_checkpoint
from transformers.trainer_jit_checkpoint import CheckpointManager

from hf_descent import DescentProblem, DescentTrainer
from hf_descent.constraints.saved_state import STATE_NAME
from hf_descent.models.ut import UTConfig, UTForSequenceClassification
from hf_descent.readout.replay import Readout
from hf_descent.training.checkpoints import newest_complete_checkpoint


DATA = classification_data(40)


def make(folder, callbacks=(), model=None, **changes):
    args = config(
        folder,
        **{
            "max_steps": 12,
            "save_strategy": "steps",
            "save_steps": 1,
            "noise_gamma": 0.4,
            **changes,
        },
    )
    return DescentTrainer(model or bert(), args, train_dataset=DATA, callbacks=list(callbacks))


# ---- kills, preemption, disks ----


@pytest.mark.slow
def test_killed_wherever_it_hurts_and_resumed_equals_straight():
    printed = python(ROOT / "tests/pipeline/kills.py", "--kills", "7", "--seed", "3", timeout=900)
    assert re.search(r"^7 kills, all resumed; [1-9]", printed, re.MULTILINE)


def forked(train):
    """The exit code of a process that trains: 7 where that fails, with the error's words."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 7
        try:
            train()
            code = 0
        except Exception as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(code)
    os.close(write)
    return os.waitpid(pid, 0)[1] >> 8, os.read(read, 4000).decode()


class Preempted(TrainerCallback):
    """Is sent SIGTERM at step 5, and gives transformers the half second until it saves."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)


class FullDisk(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 5:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))  # no file beyond 4 kB


IN_TIME = {"max_steps": 40, "save_strategy": "no", "enable_jit_checkpoint": True, "resilience": 0.1}
IN_TIME.update(resilience_form="slack")


@pytest.mark.parametrize(
    ("callback", "changes", "steps", "code", "said"),
    [(Preempted, IN_TIME, range(6, 40), 0, ""), (FullDisk, {}, [5], 7, "too large")],
)
def test_stopped_by_sigterm_or_a_full_disk_and_resumed_equals_straight(
    tmp_path, monkeypatch, callback, changes, steps, code, said
):
    monkeypatch.setattr(
        trainer_jit_checkpoint, "CheckpointManager", partial(CheckpointManager, kill_wait=0.5)
    )
    straight = fitted(make(tmp_path / "straight", **changes))
    ended, words = forked(lambda: make(tmp_path / "stopped", [callback()], **changes).train())
    assert ended == code and said in words.lower()
    assert int(newest_complete_checkpoint(str(tmp_path / "stopped")).rsplit("-")[-1]) in steps
    assert_equal_runs(straight, fitted(make(tmp_path / "stopped", **changes), checkpoint=True))


def test_an_output_path_below_a_file_is_named_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file/out"):
        make(tmp_path / "file" / "out")


# ---- spoilt checkpoints ----


def rewrite(path, tensors=None, state=None):
    """Give the state file other tensors, or other settings."""
    with safe_open(path, framework="pt") as file:
        meta = json.loads(file.metadata()["state"])
    save_file(
        dict(load_file(path), **(tensors or {})),
        path,
        metadata={"state": json.dumps(dict(meta, **(state or {})))},
    )


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    """A checkpoint in the warm-up of "auto"."""
    folder = tmp_path_factory.mktemp("two_steps")
    make(folder, max_steps=2, **AUTO).train()
    return folder / "checkpoint-2"


PROBLEM = DescentProblem("line", 1.0, 3).state_dict()
AUTO = {"descent_alpha": "auto", "initial_loss_bound": "auto", "dual_warmup_steps": 5}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "cannot be read"),
        (
            lambda path: rewrite(path, {"multipliers.values": torch.zeros(4)}),
            r"\(4,\) for 'values' where \(3,\)",
        ),
        (
            lambda path: rewrite(
                path, {"multipliers.values": torch.tensor([1.0, float("nan"), 0.0])}
            ),
            "non-finite",
        ),
        (
            lambda path: rewrite(path, {"multipliers.square": torch.tensor([1.0, -1.0, 0.0])}),
            "negative",
        ),
        (
            lambda path: rewrite(path, {"averages": torch.tensor([1.0, float("nan"), 0.0])}),
            "averages",
        ),
        (lambda path: rewrite(path, {"averages": torch.ones(4)}), "averages"),
        (lambda path: rewrite(path, state={"active_from": None}), "NoneType"),
        (
            lambda path: rewrite(path, state={"problem": dict(PROBLEM, chance_loss=float("nan"))}),
            "nan",
        ),
        (lambda path: rewrite(path, state={"problem": dict(PROBLEM, chance_loss=-1.0)}), "-1.0"),
        (
            lambda path: save_file(load_file(path), path, metadata={"state": '{"active_from": 0}'}),
            "cannot be read",
        ),
        (lambda path: save_file(load_file(path), path), "cannot be read"),
    ],
)
def test_a_spoilt_dual_state_is_named_and_never_replaced_by_zeros(
    tmp_path, two_steps, damage, message
):
    checkpoint = shutil.copytree(two_steps, tmp_path / "checkpoint-2")
    damage(checkpoint / STATE_NAME)
    with pytest.raises(ValueError, match=message) as error:
        make(tmp_path, **AUTO).train(resume_from_checkpoint=str(checkpoint))
    assert STATE_NAME in str(error.value) and "esume from" in str(error.value)


# ---- numbers ----


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_one_layer_in_one_micro_batch_that_is_not_finite_moves_no_multiplier(
    tmp_path, caplog, monkeypatch, value
):
    # The loss counts its calls, of which a run for several layers makes one.
    monkeypatch.setattr(Readout, "check_batching", lambda *_: None)

    def loss_fn(outputs, labels, num_items_in_batch=None):
        loss_fn.calls += outputs[
            "logits"
        ].requires_grad  # not those by which the loss is looked into
        return F.cross_entropy(outputs["logits"], labels) + (
            value if loss_fn.calls == loss_fn.bad else 0.0
        )

    steps = []

    for bad in (None, 5 * 3 + 2):  # layer 2 of the sixth micro-batch, which is in the third step
        loss_fn.calls = 0
        loss_fn.bad = bad
        args = config(
            tmp_path, max_steps=5, learning_rate=0.0, dual_optim="sgd", gradient_accumulation_steps=2,
            per_device_train_batch_size=4,
        )  # fmt: skip
        trainer = trained(bert(), args, InOrder, train_dataset=DATA, layer_loss_fn=loss_fn)
        steps.append(trainer.multipliers.steps)

    assert steps == [5, 4]
    assert caplog.text.count("The loss of layer 2 was not finite") == 1


def test_an_exploding_unrolled_network_is_reported_and_leaves_finite_multipliers(tmp_path, caplog):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 40}
    model = UTForSequenceClassification(UTConfig(**sizes, num_labels=3))
    settings = {"learning_rate": 1e12, "optim": "sgd", "max_grad_norm": 0.0, "noise_gamma": 0.0}
    trainer = fitted(make(tmp_path, model=model, **settings))
    assert "was not finite" in caplog.text
    assert torch.isfinite(trainer.multipliers.values).all()


# ---- long runs ----


def hooks(model):
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    # A forward put on an instance would be one that was not taken back.
    return sum(
        sum(len(getattr(module, kind)) for kind in kinds) + ("forward" in vars(module))
        for module in model.modules()
    )


class Census(TrainerCallback):
    """What the process holds, every 50 steps."""

    def __init__(self):
        self.rows = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step % 50:
            return
        gc.collect()
        process = psutil.Process()
        tensors = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
        checkpoints = sum(name.startswith("checkpoint-") for name in os.listdir(args.output_dir))
        held = (process.num_fds(), process.num_threads(), hooks(model), tensors, checkpoints)
        self.rows.append((process.memory_info().rss / 2**20, *held))


@pytest.mark.slow
def test_a_long_run_holds_no_more_and_more(tmp_path):
    census = Census()
    model = bert(dropout=0.1)
    args = config(
        tmp_path, max_steps=500, noise_gamma=0.4, resilience=0.1, resilience_form="slack", eval_strategy="steps",
        eval_steps=25, save_strategy="steps", save_steps=25, save_total_limit=2, logging_steps=25,
        load_best_model_at_end=True, metric_for_best_model="feasible_score", gradient_accumulation_steps=2,
        log_level="error", per_device_train_batch_size=4, eval_on_start=True,
    )  # fmt: skip
    DescentTrainer(
        model, args, train_dataset=DATA, eval_dataset=DATA[:20], callbacks=[census]
    ).train()
    half = len(census.rows) // 2
    (memory, *before), (memory_after, *after) = (
        [max(column) for column in zip(*rows)] for rows in (census.rows[:half], census.rows[half:])
    )

    assert len(census.rows) == 10 and memory_after <= memory + 8  # megabytes: the allocator's play
    assert all(later <= earlier for later, earlier in zip(after, before)) and after[-1] <= 3
    assert hooks(model) == 0
