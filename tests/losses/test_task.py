import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from architectures import AUDIO, MODELS, ByPlace, build
from tiny.data import classification_data, language_data
from tiny.models import bert, llama
from tiny.training import config
from transformers import BertForMaskedLM, BertForQuestionAnswering, Trainer, default_data_collator

from hf_descent import DescentTrainer, layer_losses
from hf_descent.losses.task import TaskLoss, loss_from_logits
from hf_descent.readout.labels import own_loss, shifts_labels


@pytest.mark.parametrize(
    ("model", "rows", "stack"),
    [
        (bert(), classification_data(8), "bert.encoder.layer"),
        (llama(), language_data(8), "model.layers"),
    ],
)
def test_layer_losses_are_those_of_truncated_models(model, rows, stack):
    batch = default_data_collator(rows)
    losses = layer_losses(model.eval(), batch)
    assert losses.shape == (3,) and losses.dtype == torch.float32 and losses.requires_grad
    for layer in (1, 2, 3):
        short = copy.deepcopy(model)
        del short.get_submodule(stack)[layer:]
        short.config.num_hidden_layers = layer
        assert losses[layer - 1].item() == pytest.approx(short(**batch).loss.item(), rel=1e-6)


@pytest.mark.parametrize("model", [bert(return_dict=False), ByPlace(bert())])
def test_layer_losses_of_a_model_that_returns_tuples(model):
    batch = default_data_collator(classification_data(4))
    assert torch.equal(layer_losses(model.eval(), batch), layer_losses(bert().eval(), batch))
    del batch["labels"]
    for each in (model, bert()):
        with pytest.raises(ValueError, match="labels"):
            layer_losses(each, batch)


class TinyForCTC(torch.nn.Module):
    pass


ROWS = {"labels": torch.tensor([[1, 2, 3], [1, -100, -100], [-100, -100, -100]])}


@pytest.mark.parametrize(
    ("inputs", "settings", "expected"),
    [
        ({"labels": torch.tensor([0, 2, 1])}, {}, 3),
        ({"labels": torch.tensor([[5, -100, 3], [-100, 4, -100]])}, {}, 3),
        ({"labels": torch.tensor([[5, -100, 3], [-100, 4, -100]])}, {"shifts_labels": True}, 2),
        (
            {"labels": torch.tensor([[5, 1]]), "shift_labels": torch.tensor([[1, -100]])},
            {"shifts_labels": True},
            1,
        ),
        ({"labels": torch.rand(4, 2)}, {}, 8),
        ({"start_positions": torch.tensor([1, 2])}, {}, 2),
        ({"labels": torch.full((2, 3), -100)}, {}, 0),
        ({"labels": None}, {}, None),
        ({"labels": [{"boxes": torch.rand(2, 4)}]}, {"shifts_labels": True}, None),
        ({}, {}, None),
        (ROWS, {}, 4),
        (
            {"start_positions": torch.tensor([0, 5, 6]), "input_ids": torch.zeros(3, 6)},
            {},
            2,
        ),  # the last is cut off
        (ROWS, {"model": TinyForCTC()}, 3),  # whose loss is a mean over rows
        (ROWS, {"model": TinyForCTC(), "loss_fn": len}, 4),
    ],
)
def test_items(inputs, settings, expected):
    task = TaskLoss(
        **{"model": torch.nn.Linear(1, 1), "label_names": ["labels", "start_positions"], **settings}
    )
    count = task.count(inputs)
    assert count is None if expected is None else count.item() == expected


@pytest.mark.parametrize("constant", [0.0, 0.3])
@pytest.mark.parametrize(
    ("start", "sure", "shifts"), [(1, False, True), (0, False, False), (0, True, False)]
)
def test_what_a_label_alone_adds_to_a_loss_tells_its_shift(start, sure, shifts, constant):
    labels = torch.tensor([[2, 1, 0, 2], [2, 2, 1, -100]])
    logits = torch.zeros(2, 4, 3)
    logits[:, :, 1] = 200.0 * sure  # nothing is lost on a label that is 1

    def loss_of(labels):
        losses = F.cross_entropy(
            logits[:, : 4 - start].flatten(0, 1), labels[:, start:].flatten(), reduction="sum"
        )
        return constant + losses / labels[:, start:].ne(-100).sum().clamp(min=1)

    assert shifts_labels(labels, loss_of) == shifts
    assert not shifts_labels(labels, lambda labels: constant)  # a distillation's


@pytest.mark.parametrize(
    ("wrong", "bound"),
    [
        (lambda loss: loss.repeat(8), "auto"), (lambda loss: loss[None], 1.0), (lambda loss: loss.long(), 1.0),
        (lambda loss: None, "auto"),
    ],
)  # fmt: skip
def test_a_custom_loss_is_a_scalar(tmp_path, wrong, bound):
    def loss(outputs, labels, num_items_in_batch=None):
        return wrong(F.cross_entropy(outputs["logits"], labels))

    args, data = (
        config(tmp_path, initial_loss_bound=bound, dual_warmup_steps=1),
        classification_data(8),
    )
    trainer = DescentTrainer(
        bert(), args, train_dataset=data, eval_dataset=data, layer_loss_fn=loss
    )
    for run in (trainer.train, trainer.evaluate):
        with pytest.raises(
            TypeError, match="`layer_loss_fn` .* returned .*; return a floating-point"
        ):
            run()
    assert trainer.state.global_step == 0


def test_the_loss_of_an_image_classifier_scores_logits_of_a_readout():
    logits, labels = torch.randn(4, 2), torch.tensor([0, 1, 1, 0])
    model = build("ViTForImageClassification", MODELS["ViTForImageClassification"])
    assert loss_from_logits(model, logits, labels) == F.cross_entropy(logits, labels)


def test_a_readout_cannot_feed_a_loss_of_several_outputs(tmp_path):
    model = BertForQuestionAnswering(bert(num_labels=2).config)
    rows = [
        {**row, "start_positions": 1, "end_positions": 2}
        for row in classification_data(8, pad=False)
    ]
    trainer = DescentTrainer(
        model,
        config(tmp_path),
        train_dataset=rows,
        readout=lambda model, hidden, inputs: model.qa_outputs(hidden),
    )
    with pytest.raises(
        ValueError, match="loss of BertForQuestionAnswering cannot score.*layer_loss_fn"
    ):
        trainer.train()


def test_the_shift_is_found_where_the_losses_of_an_untrained_model_round_to_one_value():
    tokens = torch.randint(3, 40, (2, 9), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": tokens, "labels": tokens}

    def shifts(model, inputs):
        return shifts_labels(inputs["labels"], partial(own_loss, model, inputs, "labels"))

    assert shifts(llama().bfloat16(), inputs)
    zero = llama()
    mean = zero.loss_function
    zero.loss_function = lambda *args, **kwargs: mean(*args, **kwargs).nan_to_num()  # of no label
    assert shifts(zero, inputs)
    masked = BertForMaskedLM(bert(num_labels=2).config).bfloat16().eval()
    assert not shifts(masked, inputs)
    masked.config.return_dict = False
    assert not shifts(masked, inputs)
    token = {
        name: tensor[:, :1] for name, tensor in inputs.items()
    }  # which is of use where nothing is shifted
    assert shifts(llama(), token) and not shifts(masked, token)


def transcriptions(reduction):
    settings = AUDIO | {"layerdrop": 0.0, "apply_spec_augment": False, "pad_token_id": 0}
    settings |= {
        f"{part}_dropout": 0.0
        for part in ("hidden", "attention", "feat_proj", "activation", "final")
    }
    model = build("Wav2Vec2ForCTC", settings | {"ctc_loss_reduction": reduction})
    generator = torch.Generator().manual_seed(0)
    return model, [
        {
            "input_values": torch.randn(400, generator=generator),
            "labels": torch.where(
                torch.arange(8) < row, torch.randint(1, 99, (8,), generator=generator), -100
            ),
        }
        for row in range(8)
    ]


def test_sums_over_the_rows_of_a_batch_are_averaged_as_trainer_does(tmp_path):
    model, data = transcriptions("sum")
    args = config(tmp_path, per_device_eval_batch_size=3)
    expected = Trainer(model, args, eval_dataset=data[1:]).evaluate()["eval_loss"]
    ours = DescentTrainer(model, args, eval_dataset=data[1:])
    assert ours.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("batch_size", [8, 2])
def test_losses_of_transcriptions_do_not_depend_on_the_batch_size(tmp_path, batch_size):
    model, data = transcriptions("mean")
    with torch.no_grad():
        expected = model.eval()(**default_data_collator(data)).loss.item()
    args = config(
        tmp_path, per_device_eval_batch_size=batch_size, per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=8 // batch_size, initial_loss_bound=30.0, max_steps=1,
    )  # fmt: skip
    trainer = DescentTrainer(model, args, train_dataset=data, eval_dataset=data)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)
    curve = trainer.evaluate_robustness(
        gammas=[0.0], metric=lambda logits, labels: (torch.tensor(0), 1)
    )
    assert curve.losses[0, 0] == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ValueError, match="no prediction for each label"):
        trainer.evaluate_robustness(gammas=[0.0])
    profile = trainer.evaluate_layers(metric=lambda logits, labels: (torch.tensor(0), 1))
    assert profile.losses[-1] == pytest.approx(expected, rel=1e-5)
    trainer.train()
    assert trainer.state.log_history[-2]["layer_loss_3"] == pytest.approx(expected, rel=1e-5)
