"""`DescentObjective` in loops without Trainer takes the steps of `DescentTrainer`."""

import inspect
import os
import random
import re
import textwrap

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from tiny.data import classification_data, language_data
from tiny.models import bert, llama
from tiny.training import InOrder, config, trained
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader
from transformers import default_data_collator, set_seed

from hf_descent import DescentObjective, layer_losses, layer_profile
from hf_descent.configs import DescentArguments


ASKED = {
    "descent_alpha": "line",
    "loss_targets": {1: 0.5},
    "dual_warmup_steps": 2,
    "dual_learning_rate": 0.1,
}
TASKS = {
    "classifier": (bert, lambda: classification_data(64), {}),
    "language model": (llama, lambda: language_data(64), {"readout_token_fraction": 0.5}),
}


def loader(data, size=4, **settings):
    return DataLoader(data, batch_size=size, collate_fn=default_data_collator, **settings)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def by_trainer(folder, task, trainer_class=InOrder):
    make, data, asked = TASKS[task]
    model = make()
    rows = data()
    args = config(
        folder, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=8, max_grad_norm=0.0,
        initial_loss_bound="auto", **ASKED, **asked,
    )  # fmt: skip
    optimizer = sgd(model)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    trainer = trainer_class(
        model, args, train_dataset=rows, eval_dataset=rows, optimizers=(optimizer, constant)
    )
    trainer.train()
    return trainer


def prepared(task, max_steps=8):
    make, data, asked = TASKS[task]
    model = make()
    rows = data()
    objective = DescentObjective(
        model, loader(rows), DescentArguments(**ASKED, **asked), max_steps=max_steps
    )
    return model, rows, objective, sgd(model)


def pairs(batches):
    batches = list(batches)
    return zip(batches[::2], batches[1::2])


def by_pytorch(task, steps=slice(None)):
    model, rows, objective, optimizer = prepared(task)
    take_steps(model, list(pairs(loader(rows)))[steps], objective, optimizer)
    return model, objective


def take_steps(model, steps, objective, optimizer):
    for micro_batches in steps:
        items = objective.count(micro_batches)
        for batch in micro_batches:
            objective(model, batch, items).backward()
        optimizer.step()
        optimizer.zero_grad()
        objective.step()


def test_a_step_without_batches_has_no_items():
    """As where another process still has some."""
    _, _, objective, _ = prepared(next(iter(TASKS)))
    assert torch.equal(objective.count([]), torch.tensor(0))


def by_accelerate(task):
    """Its own way to accumulate, whose means of means are right where all micro-batches have the same items."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    make, data, asked = TASKS[task]
    model = make()
    batches = loader(data())
    objective = DescentObjective(model, batches, DescentArguments(**ASKED, **asked), max_steps=8)
    model, optimizer, batches = accelerator.prepare(model, sgd(model), batches)

    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(objective(model, batch))
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                objective.step()

    return model, objective


@pytest.mark.parametrize(
    ("task", "loop"),
    [("classifier", by_pytorch), ("language model", by_pytorch), ("classifier", by_accelerate)],
)
def test_a_loop_and_the_trainer_are_bit_equal(tmp_path, readouts, task, loop):
    trainer = by_trainer(tmp_path, task)
    model, objective = loop(task)

    assert objective.global_step == trainer.state.global_step == 8
    assert objective.multipliers.values.tolist() == trainer.multipliers.values.tolist()
    assert objective.multipliers.values.max() > 0.1
    assert objective.problem.state_dict() == trainer.problem.state_dict()

    for parameter, other in zip(model.parameters(), trainer.model.parameters()):
        assert torch.equal(parameter, other)

    logged = [log for log in trainer.state.log_history if "lagrangian" in log][-1]

    assert (
        {"multiplier_bound_1", "weight_1", "layer_loss_1"}
        <= objective.logs().keys()
        <= logged.keys()
    )
    assert set(readouts()) == {"tiles" if task == "language model" else "replay"}


class TwiceRead(InOrder):
    """As for two draws of dropout."""

    def compute_loss(self, *args, **kwargs):
        return (super().compute_loss(*args, **kwargs) + super().compute_loss(*args, **kwargs)) / 2


def test_losses_are_means_however_often_a_batch_is_read(tmp_path):
    rows = classification_data(64)
    settings = {
        "gradient_accumulation_steps": 4,
        "per_device_train_batch_size": 4,
        "max_steps": 3,
        "logging_steps": 1,
    }
    args = config(
        tmp_path, descent_alpha=0.1, initial_loss_bound=1.0, dual_learning_rate=0.1, **settings
    )
    expected = trained(bert(), args, InOrder, train_dataset=rows)
    found = trained(bert(), args, TwiceRead, train_dataset=rows)
    torch.testing.assert_close(found.multipliers.values, expected.multipliers.values)

    assert expected.multipliers.values.max() > 0.1

    for ours, reference in zip(found.state.log_history[:3], expected.state.log_history):
        for name in ("layer_loss_1", "violation_1", "grad_norm"):
            assert ours[name] == pytest.approx(reference[name], rel=1e-4)


def test_a_micro_batch_without_labels_has_no_part_in_the_mean():
    model, rows, objective, _ = prepared("language model")
    batch = next(iter(loader(rows)))
    for labels in (
        batch["labels"],
        torch.full_like(batch["labels"], -100),
    ):  # a process may have the latter alone
        objective(model, dict(batch, labels=labels))
    objective.step()
    logs, expected = (
        objective.logs(),
        layer_losses(model, batch).tolist(),
    )  # the former of half of the tokens
    assert [logs[f"layer_loss_{layer}"] for layer in (1, 2, 3)] == pytest.approx(expected, rel=0.1)


def test_of_tokens_more_labels_are_read_since_those_of_a_text_are_alike():
    tokens = (
        torch.randint(10, (400, 12)) * torch.tensor([1, 4]).repeat_interleave(200)[:, None]
    )  # half of 10, of 30
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    objective = DescentObjective(llama(), loader(rows), DescentArguments(), max_steps=8)
    shares = torch.bincount(tokens[:, 1:].flatten()) / tokens[:, 1:].numel()
    assert objective.problem.initial_loss_bound == pytest.approx(
        torch.special.entr(shares).sum().item(), rel=0.01
    )


def test_an_optimizer_step_that_was_skipped_moves_no_multiplier():
    """As a gradient scaler does where gradients are not finite; what was read in it is not counted later, either."""
    skipping, taking = (prepared("classifier") for _ in range(2))
    batches = list(loader(skipping[1]))[:5]
    for model, _, objective, _ in (skipping, taking):
        for step, batch in enumerate(batches):
            if objective is skipping[2] or step != 3:
                objective(model, batch)
                objective.step(skipped=step == 3)
    assert (skipping[2].global_step, taking[2].global_step) == (5, 4)
    assert skipping[2].multipliers.values.tolist() == taking[2].multipliers.values.tolist()
    assert taking[2].multipliers.values.max() > 0
    assert skipping[2].logs() == taking[2].logs()


@pytest.mark.parametrize("draws", [False, True])
def test_a_loop_draws_what_plain_training_draws(draws):
    model, rows, objective, _ = prepared("classifier")
    batch = next(iter(loader(rows)))
    if draws:

        def draw(*_):
            random.random()
            np.random.randn()  # noqa: NPY002 (the global generator is what is tested)

        model.classifier.register_forward_hook(draw)
    found = []

    for call in (lambda: model(**batch), lambda: objective(model, batch)):
        set_seed(0)
        call()
        found.append((random.random(), np.random.randn(3).tolist(), torch.rand(1).item()))  # noqa: NPY002

    assert found[0] == found[1]


def test_a_step_in_which_nothing_was_read_moves_nothing(tmp_path):
    _, _, objective, _ = prepared("classifier")
    objective.step()
    assert objective.global_step == 1 and objective.logs() == {}

    class Passing(InOrder):
        def training_step(self, model, inputs, *args, **kwargs):
            passes = self.state.global_step == 3
            return (
                torch.zeros(()) if passes else super().training_step(model, inputs, *args, **kwargs)
            )

    trainer = by_trainer(tmp_path, "classifier", Passing)
    assert trainer.state.global_step == 8 and trainer.multipliers.values.isfinite().all()


def test_a_trainer_takes_a_training_step_by_itself_after_a_run(tmp_path):
    trainer = by_trainer(tmp_path, "classifier")
    batch = next(iter(loader(classification_data(64))))
    loss = trainer.training_step(trainer.model, batch)
    assert loss.item() == pytest.approx(trainer.training_step(trainer.model, batch).item())


def test_a_group_of_processes_that_train_models_of_their_own_is_left_alone(tmp_path):
    alone = by_trainer(tmp_path / "alone", "language model")
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        grouped = by_trainer(tmp_path / "grouped", "language model")
    finally:
        dist.destroy_process_group()
    assert grouped.args.world_size == 1
    for parameter, other in zip(grouped.model.parameters(), alone.model.parameters()):
        assert torch.equal(parameter, other)


def test_what_came_before_a_state_was_loaded_has_no_part_in_the_next_step():
    model, rows, objective, _ = prepared("classifier")
    batch = next(iter(loader(rows)))
    objective(model, batch)
    objective.load_state_dict(objective.state_dict())
    objective(model, batch)
    objective.step()
    assert objective.logs()["layer_loss_1"] == pytest.approx(layer_losses(model, batch)[0].item())


def test_a_loop_goes_on_from_its_state(tmp_path):
    straight, objective = by_pytorch("language model")
    before, first = by_pytorch("language model", slice(0, 4))
    torch.save(first.state_dict(), tmp_path / "descent.pt")
    model, rows, second, optimizer = prepared("language model")
    model.load_state_dict(before.state_dict())
    second.load_state_dict(torch.load(tmp_path / "descent.pt", weights_only=True))

    assert second.global_step == 4

    take_steps(model, list(pairs(loader(rows)))[4:], second, optimizer)

    assert second.multipliers.values.tolist() == objective.multipliers.values.tolist()

    for parameter, other in zip(model.parameters(), straight.parameters()):
        assert torch.equal(parameter, other)

    other = DescentArguments(**dict(ASKED, descent_alpha="steps"))
    other = DescentObjective(model, loader(rows), other, max_steps=8)

    with pytest.raises(
        ValueError, match="was saved with descent_alpha='auto' but this run has 'steps'"
    ):
        other.load_state_dict(first.state_dict())


def test_the_example_runs_and_training_draws_as_if_nothing_had_been_measured(capsys):
    code = re.search(r"```python\n(.*?)```", inspect.getdoc(DescentObjective), re.DOTALL)[1]
    rows = classification_data(64)
    model = bert()
    given = {
        "model": model, "loader": loader(rows, shuffle=True), "held_out": loader(rows), "epochs": 2,
        "optimizer": sgd(model), "DescentArguments": DescentArguments, "DescentObjective": DescentObjective,
        "layer_profile": layer_profile,
    }  # fmt: skip
    before = torch.get_rng_state()
    made = textwrap.dedent(code).split("for _ in")[0]
    exec(made, given)

    assert torch.equal(before, torch.get_rng_state()) and model.training

    exec(code, given)

    assert (
        given["objective"].global_step == 32
        and "of 2 constraints are met" in capsys.readouterr().out
    )


def test_a_batch_without_labels_is_refused():
    model, rows, objective, _ = prepared("classifier")
    batch = next(iter(loader(rows)))
    del batch["labels"]
    with pytest.raises(
        ValueError, match="no tensor of labels \\(looked for labels; found input_ids"
    ):
        objective(model, batch)


def test_what_a_loop_cannot_have_is_refused():
    model = bert()
    rows = classification_data(16)

    with pytest.raises(ValueError, match="`noise_gamma` is 0.5.*EmbeddingNoise"):
        DescentObjective(model, loader(rows), DescentArguments(noise_gamma=0.5), max_steps=4)
    with pytest.raises(ValueError, match="`batches` begins with 'input_ids'; give dicts"):
        DescentObjective(model, next(iter(loader(rows))), DescentArguments(), max_steps=4)

    def unknown(outputs, labels, num_items_in_batch=None):
        return mse_loss(outputs["logits"][:, 0], labels.float())

    with pytest.raises(ValueError, match="not known: set `initial_loss_bound`"):
        DescentObjective(
            model, loader(rows), DescentArguments(), max_steps=4, layer_loss_fn=unknown
        )

    args = DescentArguments(initial_loss_bound=2.0, descent_alpha=0.1)
    objective = DescentObjective(model, loader(rows), args, max_steps=4, layer_loss_fn=unknown)

    assert (
        objective.problem.chance_loss is None
        and objective(model, next(iter(loader(rows)))).requires_grad
    )

    with pytest.raises(ValueError, match="another model"):
        objective(bert(), next(iter(loader(rows))))


def process(rank, folder, task, counts):
    """One of two processes, with every second row of a batch; the first one writes what it has come to."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    make, data, asked = TASKS[task]
    model = DistributedDataParallel(make(), find_unused_parameters=True)
    rows = data()
    args = DescentArguments(**ASKED, **dict(asked, readout_token_fraction=None))
    objective = DescentObjective(model, loader(rows), args, max_steps=4)
    optimizer = sgd(model)
    if counts:
        take_steps(model, list(pairs(loader(rows[rank::2])))[:4], objective, optimizer)
    else:
        for batch in list(loader(rows[rank::2]))[:4]:
            objective(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            objective.step()
    if rank == 0:
        torch.save([objective.multipliers.values, model.module.state_dict()], f"{folder}/found.pt")
    dist.destroy_process_group()
    os._exit(0)  # the threads of the group may outlive it, and abort an ordinary exit


@pytest.mark.slow
@pytest.mark.parametrize(("task", "counts"), [("classifier", False), ("language model", True)])
def test_two_processes_take_the_steps_of_one(tmp_path, task, counts):
    torch.multiprocessing.spawn(process, (str(tmp_path), task, counts), nprocs=2)
    multipliers, weights = torch.load(tmp_path / "found.pt")
    make, data, asked = TASKS[task]
    model = make()
    rows = data()
    args = DescentArguments(**ASKED, **dict(asked, readout_token_fraction=None))
    objective = DescentObjective(model, loader(rows), args, max_steps=4)
    optimizer = sgd(model)
    batches = list(loader(rows, size=16 if counts else 8))[:4]
    take_steps(model, [[batch] for batch in batches], objective, optimizer)
    torch.testing.assert_close(multipliers, objective.multipliers.values, rtol=1e-4, atol=1e-5)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("task", TASKS)
def test_mixed_precision_around_the_call_rounds_no_weights(task):
    make, data, _ = TASKS[task]
    args = DescentArguments(objective="deep_supervision", penalty_coefficient=0.3)
    model = make()
    batch = next(iter(loader(data())))
    objective = DescentObjective(model, [batch], args, max_steps=1)
    with torch.autocast("cpu", torch.bfloat16):
        value = objective(model, batch)
        losses = layer_losses(model, batch)
    assert value.dtype == torch.float32
    torch.testing.assert_close(
        value, 0.3 * (losses[0] + losses[1]) + losses[2], rtol=2e-4, atol=0.0
    )


def test_a_custom_loop_restarts_its_slacks_by_itself():
    asked = {"resilience": 0.1, "resilience_form": "slack"}
    with pytest.raises(ValueError, match="`slack_restart`.*restart_slacks"):
        DescentObjective(
            bert(), loader(classification_data(16)), DescentArguments(**asked), max_steps=1
        )
    args = DescentArguments(**asked, slack_restart=False)
    objective = DescentObjective(bert(), loader(classification_data(16)), args, max_steps=1)
    objective.multipliers.slacks += 1
    objective.multipliers.restart_slacks()
    assert not objective.multipliers.slacks.any()
