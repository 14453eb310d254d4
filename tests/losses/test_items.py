"""The step of a batch is that of its own mean loss: items are the labels that are predicted, in all arms alike."""

from functools import partial

import pytest
import torch
from architectures import DECODER, GPT, XLNET, build
from tiny.training import InOrder, config, trained
from torch.nn import functional as F
from transformers.trainer_pt_utils import LabelSmoother


STILL = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "dropout": 0.0}


def rows(count=8, length=9):
    """Every second row has all of its labels, the first one's too; of the others many are not labelled."""
    generator = torch.Generator().manual_seed(0)
    data = []
    for index in range(count):
        ids = torch.randint(5, 99, (length,), generator=generator)
        labels = ids.clone()
        labels[: int(torch.randint(length - 3, (1,), generator=generator)) * (index % 2)] = -100
        data.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return data


def cross_entropy(outputs, labels, shifts, items=None, smoothing=0.0):
    logits = outputs["logits"]
    logits, labels = (logits[:, :-1], labels[:, 1:]) if shifts else (logits, labels)
    reduction = "mean" if items is None else "sum"
    loss = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction=reduction, label_smoothing=smoothing
    )
    return loss if items is None else loss / items


def mean(outputs, labels, num_items_in_batch=None, shifts=True):
    return cross_entropy(outputs, labels, shifts)


def unshifted_sum(outputs, labels, num_items_in_batch=None):
    return cross_entropy(outputs, labels, False, num_items_in_batch)


CASES = {  # model, its fields, whether it shifts, smoothing, loss of one's own
    "shifts, of another name": ("GPT2LMHeadModel", GPT | STILL, True, 0.0, None),
    "the same, smoothed": ("GPT2LMHeadModel", GPT | STILL, True, 0.1, None),
    "the same, by a loss without items": ("GPT2LMHeadModel", GPT | STILL, True, 0.0, mean),
    "does not shift, smoothed": ("XLNetLMHeadModel", XLNET | STILL, False, 0.1, None),
    "a loss that does not shift, of a model that does": (
        "LlamaForCausalLM",
        DECODER,
        False,
        0.0,
        unshifted_sum,
    ),
    "the same, without items": (
        "LlamaForCausalLM",
        DECODER,
        False,
        0.0,
        partial(mean, shifts=False),
    ),
}


# In plain training Trainer's own smoother shifts the labels of every causal language model.
STOCK = [case for case in CASES if case != "does not shift, smoothed"]


@pytest.mark.parametrize(
    ("case", "objective"),
    [*((case, "descent") for case in CASES), *((case, "erm") for case in STOCK)],
)
def test_items_are_the_labels_that_are_predicted(tmp_path, case, objective):
    name, fields, shifts, smoothing, loss_fn = CASES[case]
    data, model = rows(), build(name, fields).train()
    batch = {key: torch.stack([row[key] for row in data]) for key in data[0]}
    expected = cross_entropy(model(**batch), batch["labels"], shifts, smoothing=smoothing)
    expected.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    for size in (8, 2):
        args = config(
            tmp_path, objective=objective, label_smoothing_factor=smoothing, per_device_train_batch_size=size,
            gradient_accumulation_steps=8 // size, max_steps=1, dual_warmup_steps=1, max_grad_norm=0.0,
        )  # fmt: skip
        trainer = trained(
            build(name, fields), args, InOrder, train_dataset=data, compute_loss_func=loss_fn
        )
        log = trainer.state.log_history[0]
        assert log["loss"] == pytest.approx(expected.item(), rel=1e-5), size
        assert log["grad_norm"] == pytest.approx(norm.item(), rel=1e-4), size


def test_smoothed_labels_follow_the_model_of_each_run(tmp_path):
    """First one that shifts its labels, then one that does not."""
    data, logs = rows(), []
    args = config(tmp_path, objective="deep_supervision", label_smoothing_factor=0.1, max_steps=1)
    for first in (None, ("GPT2LMHeadModel", GPT | STILL)):
        model = build("XLNetLMHeadModel", XLNET | STILL)
        trainer = InOrder(build(*first) if first else model, args, train_dataset=data)
        if first:
            trainer.train()
            trainer.model = trainer.model_wrapped = model
        trainer.train()
        logs.append(trainer.state.log_history[0]["loss"])
    assert logs[0] == logs[1]


def test_a_custom_label_smoother_is_kept_in_plain_training(tmp_path):
    class Half(LabelSmoother):
        def __call__(self, *args, **kwargs):
            return 0.5 * super().__call__(*args, **kwargs)

    losses = []
    for smoother in (LabelSmoother(0.1), Half(0.1)):
        args = config(tmp_path, objective="erm", label_smoothing_factor=0.1, max_steps=1)
        trainer = InOrder(build("LlamaForCausalLM", DECODER), args, train_dataset=rows())
        trainer.label_smoother = smoother
        trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
    assert losses[1] == pytest.approx(losses[0] / 2)
