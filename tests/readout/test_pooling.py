import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from tiny.data import batches, classification_data
from tiny.models import SIZES, VOCAB, bert, llama
from tiny.oracles import pool
from tiny.training import config
from transformers import (
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
    TrainerCallback,
)

from hf_descent import DescentTrainer, layer_profile


DATA = classification_data(16)


class StopAtStep43(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == 43


def distilbert():
    return DistilBertForSequenceClassification(
        DistilBertConfig(
            vocab_size=VOCAB, dim=16, hidden_dim=32, n_heads=2, n_layers=3, num_labels=3
        )
    )


def roberta():
    sizes = SIZES | {"vocab_size": VOCAB, "num_hidden_layers": 3}
    return RobertaForSequenceClassification(RobertaConfig(**sizes, pad_token_id=0, num_labels=3))


def adapted(modules_to_save=("classifier",), target_modules=("query",)):
    """As PEFT has it: a head that is trained beside its frozen original, or one with an adapter of its own."""
    settings = {"target_modules": list(target_modules), "modules_to_save": list(modules_to_save)}
    model = get_peft_model(bert(), LoraConfig(r=2, init_lora_weights=False, **settings))
    for parameter in model.parameters():
        if parameter.requires_grad:  # else the head is still its original
            torch.nn.init.normal_(parameter, std=0.3)
    return model


MODELS = {
    "bert": (bert, lambda model: model.classifier),
    "distilbert": (distilbert, lambda model: model.classifier),
    "roberta": (roberta, lambda model: model.classifier.out_proj),
    "a head that PEFT trains": (
        adapted,
        lambda model: model.base_model.model.classifier.modules_to_save["default"],
    ),
    "a head with an adapter": (
        lambda: adapted([], ["query", "classifier"]),
        lambda model: model.base_model.model.classifier,
    ),
}


def losses_of_pooled_states(model, find_head, pooling):
    """The loss of the head on the pooled states of each layer, by hand."""
    [batch] = batches(DATA, len(DATA))
    with torch.no_grad():
        hidden = model(
            batch["input_ids"], batch["attention_mask"], output_hidden_states=True
        ).hidden_states[1:]
        pooled = [pool(states, batch["attention_mask"], pooling) for states in hidden]
        return [
            F.cross_entropy(find_head(model)(states), batch["labels"]).item() for states in pooled
        ]


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("name", MODELS)
def test_layers_are_read_by_the_last_linear_layer_of_the_model_alone(tmp_path, name, pooling):
    build, find_head = MODELS[name]
    torch.manual_seed(0)
    model = build().eval()
    expected = losses_of_pooled_states(model, find_head, pooling)
    profile = layer_profile(model, DATA, readout=pooling)
    assert profile.losses.tolist() == pytest.approx(expected, rel=1e-5)
    if "PEFT" in name or "adapter" in name:
        return
    metrics = DescentTrainer(model, config(tmp_path), eval_dataset=DATA, readout=pooling).evaluate()
    measured = [metrics[f"eval_layer_loss_{layer}"] for layer in (1, 2, 3)]
    assert measured == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("build", "readout", "match"),
    [
        (bert, "max", "'mean', 'cls'"),
        (llama, "mean", "LlamaForCausalLM is no classifier of transformers"),
        (adapted, "mean", "has adapters; call .*give_linear_readout.* before `get_peft_model`"),
    ],
)
def test_words_without_a_readout_are_refused(tmp_path, build, readout, match):
    with pytest.raises(ValueError, match=match):
        DescentTrainer(build(), config(tmp_path), eval_dataset=DATA, readout=readout)


def test_a_class_of_ones_own_is_refused(tmp_path):
    class MyForSequenceClassification(BertForSequenceClassification):
        """Who knows what its forward does."""

    with pytest.raises(ValueError, match="is no classifier of transformers for texts"):
        DescentTrainer(
            MyForSequenceClassification(bert().config),
            config(tmp_path),
            eval_dataset=DATA,
            readout="mean",
        )


@pytest.mark.parametrize(
    ("early_layers_read", "readout", "learning_rate", "warmup", "is_said"),
    [
        (False, None, 1e-2, {}, True),
        (True, None, 1e-2, {}, False),
        (False, "mean", 1e-2, {}, False),
        (False, None, 1e-9, {}, False),
        (
            False,
            None,
            1e-2,
            {"max_steps": 400, "dual_warmup_steps": 0, "exit_targets": {2: 0.5}},
            True,
        ),
    ],
)
def test_early_layers_at_chance_under_a_first_token_head_are_reported_once(
    tmp_path, caplog, early_layers_read, readout, learning_rate, warmup, is_said
):
    """Layers 1 and 2 bring no other token to the first one, where they are made so."""
    model = bert()
    for layer in model.bert.encoder.layer[: 0 if early_layers_read else 2]:
        for parameter in layer.attention.output.dense.parameters():
            parameter.requires_grad_(False).zero_()
    given = {
        "max_steps": 43,
        "dual_warmup_steps": 40,
        "learning_rate": learning_rate,
        "initial_loss_bound": "auto",
    }
    data = classification_data(256, pad=False)
    args = config(tmp_path, per_device_train_batch_size=16, **given | warmup)
    with caplog.at_level("INFO", logger="hf_descent"):
        DescentTrainer(
            model, args, train_dataset=data, readout=readout, callbacks=[StopAtStep43()]
        ).train()
    messages = [record.getMessage() for record in caplog.records]
    said = [message for message in messages if "layers are still at chance" in message]
    assert len(said) == is_said
    for message in said:
        assert "2 of 3 layers" in message and 'readout="mean"' in message
