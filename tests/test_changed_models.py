"""Layers are read as the model is now, whatever was done to it since they were found."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny.data import language_data
from tiny.models import VOCAB, llama, spread
from tiny.training import config, fitted
from torch import nn
from transformers import TrainerCallback, default_data_collator

from hf_descent import DescentTrainer, layer_losses


def adapted(on_head):
    """With two adapters: b alone acts on the head, or each has a head of its own."""
    options = {"r": 2, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    saved = {} if on_head else {"modules_to_save": ["lm_head"]}
    first = LoraConfig(target_modules=["q_proj"], **options, **saved)
    second = LoraConfig(
        target_modules=["q_proj", "lm_head"] if on_head else ["q_proj"], **options, **saved
    )
    model = get_peft_model(spread(llama()), first, adapter_name="one")
    model.add_adapter("two", second)
    for name, parameter in model.named_parameters():
        if "modules_to_save" in name:
            nn.init.normal_(parameter)
    model.set_adapter("one")
    return model


def make(folder, model, **settings):
    data = language_data(8)
    return DescentTrainer(
        model, config(folder, **settings), train_dataset=language_data(80), eval_dataset=data
    )


CHANGES = {
    "another adapter": lambda trainer: trainer.model.set_adapter("two"),
    "no adapter": lambda trainer: trainer.model.base_model.disable_adapter_layers(),
    "merged": lambda trainer: setattr(trainer, "model", trainer.model.merge_and_unload()),
    "another model": lambda trainer: setattr(trainer, "model", llama(seed=1)),
    "another head": lambda trainer: trainer.model.get_base_model().set_output_embeddings(
        nn.Linear(16, VOCAB)
    ),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("on_head", [False, True])
def test_evaluation_follows_the_model(tmp_path, change, on_head):
    trainer, batch, losses = (
        make(tmp_path, adapted(on_head)),
        default_data_collator(language_data(8)),
        [],
    )
    trainer.train()  # one that only evaluates finds the layers anew each time
    for changed in (lambda trainer: None, CHANGES[change]):
        changed(trainer)
        metrics = trainer.evaluate()
        trainer.model.eval()
        with torch.no_grad():
            losses.append(trainer.model(**batch).loss.item())
            expected = layer_losses(trainer.model, batch).tolist()
        assert metrics["eval_loss"] == pytest.approx(losses[-1], rel=1e-5)
        assert [metrics[f"eval_layer_loss_{layer}"] for layer in (1, 2, 3)] == pytest.approx(
            expected, rel=1e-5
        )
    assert change == "merged" or losses[0] != pytest.approx(losses[1], rel=1e-3)


def test_another_depth_needs_another_trainer(tmp_path):
    trainer = fitted(make(tmp_path, llama()))
    trainer.model = llama(2)
    with pytest.raises(ValueError, match=r"`layer_losses` has shape \[2\]; give \[3\]"):
        trainer.evaluate()


@pytest.mark.parametrize("on_head", [False, True])
def test_an_adapter_that_training_switches_to_is_trained(tmp_path, on_head):
    class Switch(TrainerCallback):
        def on_step_end(self, args, state, control, model, **kwargs):
            if state.global_step == 3:
                model.set_adapter("two")

    runs = []
    for objective in ("descent", "erm"):  # of the latter the steps are Trainer's own
        model = adapted(on_head)
        trained = [
            parameter
            for name, parameter in model.named_parameters()
            if "lora_" in name or "_to_save" in name
        ]
        settings = {
            "objective": objective,
            "dual_warmup_steps": 99,
            "max_steps": 8,
            "logging_steps": 1,
        }
        trainer = make(tmp_path, model, **settings)
        trainer.optimizer = torch.optim.SGD(trained, 0.1)
        trainer.add_callback(Switch())
        trainer.train()
        losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        runs.append((losses, dict(model.named_parameters())))
    (losses, weights), (expected, expected_weights) = runs
    assert losses == pytest.approx(expected, rel=1e-4)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-4, atol=1e-5)
