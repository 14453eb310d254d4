"""What is refused before training time is spent, on real models: each used to train, or to end in a raw error."""

import logging
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from accelerate import PartialState
from datasets import Dataset
from tiny.data import classification_data, language_data
from tiny.models import bert, llama
from tiny.tokenizers import word_tokenizer
from tiny.training import InOrder, config
from transformers import (
    DataCollatorForLanguageModeling,
    ReformerConfig,
    ReformerForSequenceClassification,
    default_data_collator,
)
from transformers.utils.import_utils import is_torch_greater_or_equal

from hf_descent import DescentTrainer
from hf_descent.losses.layerwise import _require_gradients
from hf_descent.training.checks import report_own_averages


DATA = classification_data(24)
TEXT = "but BertForSequenceClassification takes whole numbers, 0 to 2"


def relabelled(change, rows=DATA):
    return [{**row, "labels": change(index, row["labels"])} for index, row in enumerate(rows)]


def fit(folder, model, data, eval_dataset=None, **keywords):
    args = config(folder, max_steps=4, **keywords.pop("settings", {}))
    trainer = DescentTrainer(model, args, train_dataset=data, eval_dataset=eval_dataset, **keywords)
    try:
        trainer.train()
    finally:
        assert trainer.state.global_step in (0, 4)  # nothing at all, or all
    return trainer


@pytest.mark.parametrize("kind", [list, Dataset.from_list])
@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda index, label: label + 3, r"has [345], .*num_labels"),
        (lambda index, label: -1, r"has -1, .*-100"),
    ],
)
def test_labels_that_are_no_classes_of_the_model_are_refused(tmp_path, kind, change, found):
    with pytest.raises(ValueError, match=f"`labels`.* {found}") as error:
        fit(tmp_path, bert(), kind(relabelled(change)))
    assert "BertForSequenceClassification takes whole numbers, 0 to 2" in str(error.value)


@pytest.mark.parametrize("kind", [list, Dataset.from_list])
def test_a_label_that_comes_late_or_in_evaluation_is_refused_at_the_start(tmp_path, kind):
    late = kind(relabelled(lambda index, label: 3 if index == 23 else label))
    with pytest.raises(ValueError, match=f"`labels` in `train_dataset` has 3, {TEXT}"):
        fit(tmp_path, bert(), late)
    if isinstance(late, Dataset):
        with pytest.raises(ValueError, match=f"`labels` in `train_dataset` has 3, {TEXT}"):
            fit(tmp_path, bert(), late.shuffle(seed=0).select(range(20)))
    with pytest.raises(ValueError, match=f"`labels` in `eval_dataset` has 3, {TEXT}"):
        fit(tmp_path, bert(), DATA, late)
    with pytest.raises(ValueError, match=f"`labels` in `b` has 3, {TEXT}"):
        fit(tmp_path, bert(), DATA, {"a": DATA, "b": late})


def test_labels_that_are_made_right_on_their_way_are_taken(tmp_path):
    """As are those of true and false, which a collator numbers, and what stands in a column that is not used."""

    def from_one(rows):
        return default_data_collator([{**row, "labels": row["labels"] - 1} for row in rows])

    def numbered(rows):
        return {
            name: [int(x) for x in values] if name == "labels" else values
            for name, values in rows.items()
        }

    fit(tmp_path, bert(), relabelled(lambda index, label: label + 1), data_collator=from_one)
    fit(
        tmp_path,
        bert(),
        Dataset.from_list(relabelled(lambda index, label: str(label))).with_transform(numbered),
    )
    fit(
        tmp_path,
        bert(num_labels=2),
        [{"input_ids": row["input_ids"], "label": row["labels"] > 0} for row in DATA],
    )
    fit(tmp_path, bert(), [{**row, "label": 9} for row in DATA])
    if is_torch_greater_or_equal("2.12"):  # from which on their loss has a gradient
        fit(tmp_path, bert(num_labels=1), relabelled(lambda index, label: label + 7))
    some_wrong = Dataset.from_list(
        relabelled(lambda index, label: 3 if index < 6 else label)
    ).shuffle(seed=0)
    fit(tmp_path, bert(), some_wrong.filter(lambda row: row["labels"] < 3))
    fit(tmp_path, bert(), some_wrong.sort("labels").select(range(18)))
    scored = Dataset.from_list(
        [{"input_ids": row["input_ids"], "label": 99} for row in DATA]
    )  # of a text, no token
    fit(
        tmp_path,
        llama(),
        scored,
        data_collator=DataCollatorForLanguageModeling(word_tokenizer(), mlm=False),
    )


def test_rows_without_any_label_are_called_so(tmp_path, caplog):
    rows = [{**row, "labels": torch.full_like(row["labels"], -100)} for row in language_data(24)]
    with caplog.at_level(logging.WARNING):
        fit(tmp_path, llama(), rows)
    assert "All labels of the first batch are -100" in caplog.text


def test_training_on_no_rows_is_refused(tmp_path):
    for rows in ([], Dataset.from_list(DATA).filter(lambda row: False)):
        with pytest.raises(ValueError, match="`train_dataset` has no examples"):
            fit(tmp_path, bert(), rows)


@pytest.mark.parametrize("build", [bert, llama])
def test_what_helps_a_constrained_layer_without_gradient(tmp_path, build):
    data, model = (DATA, build()) if build is bert else (language_data(24), build())
    layers = model.bert.encoder.layer if build is bert else model.model.layers
    model.base_model.requires_grad_(False)
    with pytest.raises(ValueError, match="layer 1 has no gradient.*objective='erm'"):
        fit(tmp_path, model, data, settings={"constrained_layers": [1, 2]})
    layers[2].requires_grad_(True)
    with pytest.raises(ValueError, match="layer 2 has no gradient.*set `constrained_layers`"):
        fit(tmp_path, model, data, settings={"constrained_layers": [2, 3]})
    multipliers = fit(
        tmp_path, model, data, settings={"constrained_layers": [3]}
    ).multipliers.values
    assert multipliers[2] > 0 and not multipliers[:2].any()


def test_reversible_layers_are_not_called_frozen(tmp_path):
    sizes = {"attn_layers": ["local", "local"], "num_hidden_layers": 2, "is_decoder": False}
    sizes.update(hidden_size=16, feed_forward_size=16, num_attention_heads=2)
    sizes.update(attention_head_size=8, axial_pos_shape=[4, 8], axial_pos_embds_dim=[8, 8])
    sizes.update(vocab_size=40, max_position_embeddings=32, local_attn_chunk_length=8)
    torch.manual_seed(0)
    reformer = ReformerForSequenceClassification(ReformerConfig(**sizes, num_labels=3))

    with pytest.raises(ValueError, match="Reformer.*reversible.*objective='erm'") as refused:
        fit(tmp_path, reformer, classification_data(24, length=32, pad=False))

    assert "Unfreeze" not in str(refused.value)

    checkpointed = torch.nn.Linear(2, 2)
    checkpointed.gradient_checkpointing = True
    stack = SimpleNamespace(layers=[checkpointed], name="layers")
    readout = SimpleNamespace(model=checkpointed, stack=stack, num_layers=2)

    with pytest.raises(ValueError, match="layer 1 has no gradient.*use_reentrant=False"):
        _require_gradients([torch.zeros(1)], SimpleNamespace(trained=[1]), readout)


def test_prompts_that_are_trained_are_left_to_plain_training(tmp_path):
    peft = pytest.importorskip("peft")
    tuning = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    prompted = peft.get_peft_model(llama(), tuning)
    with pytest.raises(ValueError, match="PromptTuningConfig puts.*objective='erm'"):
        fit(tmp_path, prompted, language_data(24))
    trainer = fit(
        tmp_path, prompted, language_data(24), settings={"objective": "erm", "descent_alpha": None}
    )
    assert trainer.state.global_step == 4


def test_messages_of_a_single_process_name_no_rank(tmp_path, caplog):
    rows = [{**row, "labels": torch.full_like(row["labels"], -100)} for row in language_data(24)]
    trainer = fit(tmp_path, llama(), rows, settings={"noise_gamma": 0.5})
    trainer.evaluate(rows)
    assert "labels of the first batch are -100" in caplog.text and "Noise level 1 is" in caplog.text
    assert "[RANK" not in caplog.text


@pytest.mark.parametrize(("processes", "is_said"), [(1, False), (2, True)])
def test_processes_that_average_by_themselves_are_told_of_other_objectives(
    caplog, processes, is_said
):
    PartialState()
    args = SimpleNamespace(world_size=processes, average_tokens_across_devices=False)
    report_own_averages(args)
    assert ("`average_tokens_across_devices=False`" in caplog.text) == is_said
    caplog.clear()
    report_own_averages(SimpleNamespace(world_size=2, average_tokens_across_devices=True))
    assert not caplog.text


def test_a_weighted_sum_over_the_items_does_not_depend_on_accumulation(tmp_path):
    """As the docstring of the trainer says beside `layer_loss_fn`; of the weighted mean it says that it does."""
    weight = torch.tensor([5.0, 1.0, 0.2])

    def weighted_sum(outputs, labels, num_items_in_batch=None):
        loss = F.cross_entropy(outputs.logits, labels, weight=weight, reduction="sum")
        return loss / num_items_in_batch

    def weighted_mean(outputs, labels, num_items_in_batch=None):
        return F.cross_entropy(outputs.logits, labels, weight=weight)

    def first_gradient(loss, objective, size, steps):
        settings = {"objective": objective, "max_steps": 1, "optim": "sgd", "max_grad_norm": 0.0}
        settings.update(per_device_train_batch_size=size, gradient_accumulation_steps=steps)
        model = bert()
        before = model.classifier.weight.detach().clone()
        InOrder(model, config(tmp_path, **settings), train_dataset=DATA, layer_loss_fn=loss).train()
        return before - model.classifier.weight.detach()

    for objective in ("erm", "descent"):
        for loss, is_alike in ((weighted_sum, True), (weighted_mean, False)):
            whole, parts = (first_gradient(loss, objective, *each) for each in ((8, 1), (2, 4)))
            assert torch.allclose(whole, parts, rtol=1e-3, atol=1e-7) == is_alike


def test_a_loss_of_ones_own_takes_labels_that_the_model_s_does_not(tmp_path):
    def ordinal(outputs, labels, num_items_in_batch=None):
        return (outputs.logits.softmax(-1) @ torch.arange(3.0) - labels).square().mean()

    rows = relabelled(lambda index, label: label + 0.5)
    metrics = fit(tmp_path, bert(), rows, rows, layer_loss_fn=ordinal).evaluate()
    assert metrics["eval_layer_loss_3"] == metrics["eval_loss"]


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"exit_targets": {3: 0.1}}, "`exit_targets` is {3: 0.1}.* layers 1 to 2"),
        ({"loss_targets": {4: 0.1}}, "`loss_targets` is {4: 0.1}.* layers 1 to 3"),
        ({"constrained_layers": [1, 4]}, "`constrained_layers` names layer 4"),
    ],
)
def test_layers_that_the_model_does_not_have_are_refused_when_the_trainer_is_made(
    tmp_path, given, found
):
    with pytest.raises(ValueError, match=found):
        DescentTrainer(bert(num_layers=3), config(tmp_path, **given), train_dataset=DATA)


def test_a_loss_that_is_no_function_is_named(tmp_path):
    with pytest.raises(TypeError, match="`layer_loss_fn` is 3"):
        DescentTrainer(bert(), config(tmp_path), train_dataset=DATA, layer_loss_fn=3)
