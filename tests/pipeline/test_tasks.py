"""Every task that Trainer trains: the layer losses are those of truncated models, and the constraints act."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
import transformers
from architectures import AUDIO
from tiny.models import VOCAB
from tiny.training import config, trained

from hf_descent import DescentTrainer


SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
BERT = {**SMALL, "vocab_size": VOCAB, "max_position_embeddings": 32}
LENGTH = 8


def token_ids(generator):
    return torch.randint(5, VOCAB, (LENGTH,), generator=generator)


def text(label):
    def row(generator):
        ids = token_ids(generator)
        return {
            "input_ids": ids,
            "attention_mask": torch.ones(LENGTH, dtype=torch.long),
            **label(ids, generator),
        }

    return row


def masked(ids, generator):
    hide = torch.rand(LENGTH, generator=generator) < 0.4
    hide[0] = True
    return {"input_ids": torch.where(hide, 3, ids), "labels": torch.where(hide, ids, -100)}


def image(generator):
    return {
        "pixel_values": torch.randn(3, 8, 8, generator=generator),
        "labels": int(token_ids(generator)[0]) % 2,
    }


def choices(generator):
    ids = torch.stack([token_ids(generator) for _ in range(3)])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": int(ids[0, 0]) % 3}


GPT2 = {
    "vocab_size": VOCAB,
    "n_positions": 32,
    "n_embd": 16,
    "n_layer": 3,
    "n_head": 2,
    "pad_token_id": 0,
}
T5 = {
    "vocab_size": VOCAB, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_decoder_layers": 3,
    "num_heads": 2,
}  # fmt: skip
MIXTRAL = {
    **SMALL, "vocab_size": VOCAB, "num_key_value_heads": 2, "num_local_experts": 3, "max_position_embeddings": 32,
}  # fmt: skip
MIXTRAL.update(output_router_logits=True, router_aux_loss_coef=0.1)
SPEECH = dict(
    AUDIO | SMALL, mask_time_prob=0.3, layerdrop=0.0
)  # masks are written into the features in training


def speech(generator):
    return {
        "input_values": torch.randn(2000, generator=generator),
        "labels": int(token_ids(generator)[0]) % 2,
    }


def model_of(name, settings):
    model_class = getattr(transformers, name)
    return model_class(model_class.config_class(**settings))


# name -> class, settings of its config, and what draws a row
TASKS = {
    "sequence": ("BertForSequenceClassification", dict(BERT, num_labels=3), text(lambda x, g: {"labels": x[0] % 3})),
    "tokens": (
        "BertForTokenClassification", dict(BERT, num_labels=4),
        text(lambda x, g: {"labels": torch.where(x % 3 > 0, x % 4, -100)}),
    ),
    "masked": ("BertForMaskedLM", BERT, text(masked)),
    "answers": (
        "BertForQuestionAnswering", BERT,
        text(lambda x, g: {"start_positions": x[0] % LENGTH, "end_positions": x[1] % LENGTH}),
    ),
    "choice": ("BertForMultipleChoice", BERT, choices),
    "regression": (
        "BertForSequenceClassification", dict(BERT, num_labels=1, problem_type="regression"),
        text(lambda x, g: {"labels": (x[0] % 7) / 2.0}),
    ),
    "multi_label": (
        "BertForSequenceClassification", dict(BERT, num_labels=3, problem_type="multi_label_classification"),
        text(lambda x, g: {"labels": (x[:3] % 2).float()}),
    ),
    "image": ("ViTForImageClassification", dict(SMALL, image_size=8, patch_size=4, num_labels=2), image),
    "causal": ("GPT2LMHeadModel", GPT2, text(lambda x, g: {"labels": x})),
    "causal_classification": (
        "GPT2ForSequenceClassification", dict(GPT2, num_labels=3), text(lambda x, g: {"labels": x[0] % 3}),
    ),
    "seq2seq": (
        "T5ForConditionalGeneration", dict(T5, decoder_start_token_id=0), text(lambda x, g: {"labels": x.flip(0)}),
    ),
    "speech": ("Wav2Vec2ForSequenceClassification", SPEECH, speech),
    "mixture": ("MixtralForCausalLM", MIXTRAL, text(lambda x, g: {"labels": x})),
}  # fmt: skip
# Where the layers are, by how the name of the class begins.
STACKS = {
    "Bert": "bert.encoder.layer", "ViT": "vit.layers", "GPT2": "transformer.h", "T5": "decoder.block",
    "Wav2Vec2": "wav2vec2.encoder.layers", "Mixtral": "model.layers",
}  # fmt: skip


def model_and_data(task, **settings):
    name, config_settings, row = TASKS[task]
    torch.manual_seed(0)
    model = model_of(name, config_settings | settings)
    generator = torch.Generator().manual_seed(0)
    return model, [row(generator) for _ in range(32)]


def truncated(model, layers):
    model = copy.deepcopy(model)
    stack = next(stack for start, stack in STACKS.items() if type(model).__name__.startswith(start))
    del model.get_submodule(stack)[layers:]
    for field in ("num_hidden_layers", "n_layer", "num_decoder_layers"):
        if hasattr(model.config, field):
            setattr(model.config, field, layers)
    model.config.output_router_logits = False
    return model


@pytest.mark.parametrize("task", TASKS)
def test_layer_losses_and_constraints(tmp_path, task):
    model, data = model_and_data(task)
    args = config(
        tmp_path, descent_alpha="auto", initial_loss_bound="auto", dual_warmup_steps=3, loss_targets={1: 1e-3},
        learning_rate=1e-3, max_steps=8, per_device_eval_batch_size=32,
    )  # fmt: skip
    trainer = trained(model, args, train_dataset=data, eval_dataset=data)

    assert trainer.multipliers.values.shape == (3 + 1,) and trainer.multipliers.values[3] > 0
    assert 0 < trainer.problem.initial_loss_bound < 10

    metrics = trainer.evaluate()
    batch = trainer.data_collator(data)

    for layer in (1, 2, 3):
        short = truncated(trainer.model, layer).eval()
        with torch.no_grad():
            expected = short(**batch).loss.item()
        assert metrics[f"eval_layer_loss_{layer}"] == pytest.approx(expected, rel=1e-4), layer

    assert metrics["eval_loss"] == pytest.approx(metrics["eval_layer_loss_3"], rel=1e-5)


class OfVectors(torch.nn.Module):
    """A module of one's own, without a config."""

    def __init__(self, score, as_tuple):
        super().__init__()
        self.embed = torch.nn.Linear(4, 8)
        self.head = torch.nn.Linear(8, 3)
        layers = (torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(3))
        self.layers = torch.nn.ModuleList(layers)
        self.score = score
        self.as_tuple = as_tuple

    def forward(self, inputs, labels=None, depth=3):
        hidden = self.embed(inputs)
        for layer in self.layers[:depth]:
            hidden = layer(hidden)
        outputs = {"logits": self.head(hidden)}
        if labels is not None:
            outputs = {"loss": self.score(outputs["logits"], labels), **outputs}
        return tuple(outputs.values()) if self.as_tuple else outputs


@pytest.mark.parametrize("as_tuple", [False, True])
@pytest.mark.parametrize("score", [F.cross_entropy, F.mse_loss])
def test_vectors(tmp_path, score, as_tuple):
    torch.manual_seed(0)
    inputs = torch.randn(32, 4)
    labels = torch.randint(3, (32,)) if score is F.cross_entropy else torch.randn(32, 3)
    data = [{"inputs": x, "labels": y} for x, y in zip(inputs, labels)]
    args = config(tmp_path, initial_loss_bound="auto", dual_warmup_steps=2, label_names=["labels"])
    trainer = trained(OfVectors(score, as_tuple), args, train_dataset=data, eval_dataset=data)
    constant = math.log(3) if score is F.cross_entropy else labels.var().item()

    assert trainer.problem.initial_loss_bound == pytest.approx(constant, rel=0.2)

    metrics = trainer.evaluate()

    for layer in (1, 2, 3):
        with torch.no_grad():
            outputs = trainer.model(inputs, labels, depth=layer)
        expected = (outputs[0] if as_tuple else outputs["loss"]).item()
        assert metrics[f"eval_layer_loss_{layer}"] == pytest.approx(expected, rel=1e-5)


def test_a_router_s_loss_enters_the_objective_once(tmp_path):
    """Without multipliers the constrained step is the stock step, auxiliary loss included."""
    finals = []
    for trainer_class in (transformers.Trainer, DescentTrainer):
        model, data = model_and_data("mixture")
        args = config(tmp_path, max_steps=3, dual_warmup_steps=3, learning_rate=1e-3)
        transformers.set_seed(0)
        trainer_class(model, args, train_dataset=data).train()
        finals.append(model.state_dict())
    torch.testing.assert_close(*finals, rtol=1e-4, atol=1e-6)


def test_layer_drop_is_refused_in_training(tmp_path):
    model, data = model_and_data("speech", layerdrop=0.2)
    with pytest.raises(ValueError, match="layerdrop"):
        DescentTrainer(model, config(tmp_path), train_dataset=data).train()
