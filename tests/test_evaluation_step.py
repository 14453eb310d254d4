import logging
from types import SimpleNamespace

import pytest
import torch
from tiny import batches, bert, classification_data, config, naive_layer_losses
from transformers import default_data_collator

from hf_descent import DescentTrainer
from hf_descent.evaluation_step import EvaluationMixin


DATA = classification_data()
DATA_TEST = classification_data(32, seed=1)


def test_evaluation_before_training_and_by_batches_of_unequal_size(tmp_path):
    args = config(tmp_path, per_device_eval_batch_size=7)
    trainer = DescentTrainer(bert(), args, eval_dataset=DATA_TEST)
    metrics = trainer.evaluate()
    whole = next(batches(DATA_TEST, 32))
    model = bert().eval()
    with torch.no_grad():
        expected = naive_layer_losses(model, whole).tolist()
    assert [metrics[f"eval_layer_loss_{layer}"] for layer in (1, 2, 3)] == pytest.approx(expected, rel=1e-5)
    assert "eval_feasible" in metrics


def test_a_collator_may_make_several_rows_of_an_example(tmp_path):
    def windows(rows):
        batch = default_data_collator(rows)
        return {name: torch.cat([tensor, tensor.flip(0), tensor]) for name, tensor in batch.items()}

    trainer = DescentTrainer(bert(), config(tmp_path), eval_dataset=DATA_TEST[:10], data_collator=windows)
    loss = trainer.evaluate()["eval_loss"]
    with torch.no_grad():
        expected = bert().eval()(**windows(DATA_TEST[:10])).loss.item()
    assert loss == pytest.approx(expected, rel=1e-5)


def test_hidden_states_do_not_pile_up_as_predictions(tmp_path):
    model = bert()
    model.config.output_hidden_states = True
    trainer = DescentTrainer(model, config(tmp_path), train_dataset=DATA)
    trainer.train()
    assert trainer.predict(DATA_TEST).predictions.shape == (32, 3)


@pytest.mark.parametrize(("remainder", "warned"), [(-1, True), (0, False), (3, False)])
def test_rows_of_a_last_batch_that_cannot_be_told_from_repeats_are_said(caplog, monkeypatch, remainder, warned):
    monkeypatch.setattr(logging.getLogger("hf_descent"), "propagate", True)
    loader = SimpleNamespace(end_of_dataloader=True, remainder=remainder)
    args = SimpleNamespace(world_size=2, process_index=0, dataloader_drop_last=False)
    process = SimpleNamespace(args=args, accelerator=SimpleNamespace(gradient_state=loader))
    rows = EvaluationMixin._rows_counted_once(process, {"input_ids": torch.zeros(4, 2)})
    assert rows == (3 if remainder == 3 else None)
    assert ("may count twice" in caplog.text) == warned
