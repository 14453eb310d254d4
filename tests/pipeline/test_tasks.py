"""Every task that Trainer trains: the layer losses are those of truncated models, and the constraints act."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
import transformers
from architectures import AUDIO, build
from tiny import VOCAB, config

from hf_descent import DescentTrainer


SMALL = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
BERT = {**SMALL, "vocab_size": VOCAB, "max_position_embeddings": 32}
LENGTH = 8


def bert_for(head, **settings):
    return lambda: getattr(transformers, f"BertFor{head}")(transformers.BertConfig(**BERT, **settings))


def token_ids(generator):
    return torch.randint(5, VOCAB, (LENGTH,), generator=generator)


def text(label):
    def row(generator):
        ids = token_ids(generator)
        return {"input_ids": ids, "attention_mask": torch.ones(LENGTH, dtype=torch.long), **label(ids, generator)}

    return row


def masked(ids, generator):
    hide = torch.rand(LENGTH, generator=generator) < 0.4
    hide[0] = True
    return {"input_ids": torch.where(hide, 3, ids), "labels": torch.where(hide, ids, -100)}


def image(generator):
    return {"pixel_values": torch.randn(3, 8, 8, generator=generator), "labels": int(token_ids(generator)[0]) % 2}


def choices(generator):
    ids = torch.stack([token_ids(generator) for _ in range(3)])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": int(ids[0, 0]) % 3}


BERT_STACK = "bert.encoder.layer"
TASKS = {
    "sequence": (
        bert_for("SequenceClassification", num_labels=3),
        BERT_STACK,
        text(lambda x, g: {"labels": x[0] % 3}),
    ),
    "tokens": (
        bert_for("TokenClassification", num_labels=4),
        BERT_STACK,
        text(lambda x, g: {"labels": torch.where(x % 3 > 0, x % 4, -100)}),
    ),
    "masked": (bert_for("MaskedLM"), BERT_STACK, text(masked)),
    "answers": (
        bert_for("QuestionAnswering"),
        BERT_STACK,
        text(lambda x, g: {"start_positions": x[0] % LENGTH, "end_positions": x[1] % LENGTH}),
    ),
    "choice": (bert_for("MultipleChoice"), BERT_STACK, choices),
    "regression": (
        bert_for("SequenceClassification", num_labels=1, problem_type="regression"),
        BERT_STACK,
        text(lambda x, g: {"labels": (x[0] % 7) / 2.0}),
    ),
    "multi_label": (
        bert_for("SequenceClassification", num_labels=3, problem_type="multi_label_classification"),
        BERT_STACK,
        text(lambda x, g: {"labels": (x[:3] % 2).float()}),
    ),
    "image": (
        lambda: transformers.ViTForImageClassification(
            transformers.ViTConfig(**SMALL, image_size=8, patch_size=4, num_labels=2)
        ),
        "vit.layers",
        image,
    ),
    "causal": (
        lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=VOCAB, n_positions=32, n_embd=16, n_layer=3, n_head=2)
        ),
        "transformer.h",
        text(lambda x, g: {"labels": x}),
    ),
    "causal_classification": (
        lambda: transformers.GPT2ForSequenceClassification(
            transformers.GPT2Config(
                vocab_size=VOCAB, n_positions=32, n_embd=16, n_layer=3, n_head=2, num_labels=3, pad_token_id=0
            )
        ),
        "transformer.h",
        text(lambda x, g: {"labels": x[0] % 3}),
    ),
    "seq2seq": (
        lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_decoder_layers=3, num_heads=2,
                decoder_start_token_id=0,
            )
        ),
        "decoder.block",
        text(lambda x, g: {"labels": x.flip(0)}),
    ),
    "speech": (  # with its default masks, which are written into the features in training
        lambda: build("Wav2Vec2ForSequenceClassification", AUDIO | SMALL | {"mask_time_prob": 0.3, "layerdrop": 0.0}),
        "wav2vec2.encoder.layers",
        lambda g: {"input_values": torch.randn(2000, generator=g), "labels": int(token_ids(g)[0]) % 2},
    ),
    "mixture": (
        lambda: transformers.MixtralForCausalLM(
            transformers.MixtralConfig(
                **SMALL, vocab_size=VOCAB, num_key_value_heads=2, num_local_experts=3, max_position_embeddings=32,
                output_router_logits=True, router_aux_loss_coef=0.1,
            )
        ),
        "model.layers",
        text(lambda x, g: {"labels": x}),
    ),
}  # fmt: skip


def truncated(model, stack, layers):
    model = copy.deepcopy(model)
    parent, name = stack.rsplit(".", 1)
    parent = model.get_submodule(parent)
    setattr(parent, name, getattr(parent, name)[:layers])
    for field in ("num_hidden_layers", "n_layer", "num_decoder_layers"):
        if hasattr(model.config, field):
            setattr(model.config, field, layers)
    model.config.output_router_logits = False
    return model


@pytest.mark.parametrize("task", TASKS)
def test_layer_losses_and_constraints(tmp_path, task):
    make, stack, row = TASKS[task]
    torch.manual_seed(0)
    model = make()
    generator = torch.Generator().manual_seed(0)
    data = [row(generator) for _ in range(32)]
    args = config(
        tmp_path, descent_alpha="auto", initial_loss_bound="auto", dual_warmup_steps=3, loss_targets={1: 1e-3},
        learning_rate=1e-3, max_steps=8, per_device_eval_batch_size=32,
    )  # fmt: skip
    trainer = DescentTrainer(model, args, train_dataset=data, eval_dataset=data)
    trainer.train()
    assert trainer.multipliers.values.shape == (3 + 1,) and trainer.multipliers.values[3] > 0
    assert 0 < trainer.problem.initial_loss_bound < 10

    metrics = trainer.evaluate()
    batch = trainer.data_collator(data)
    for layer in (1, 2, 3):
        short = truncated(trainer.model, stack, layer).eval()
        with torch.no_grad():
            expected = short(**batch).loss.item()
        assert metrics[f"eval_layer_loss_{layer}"] == pytest.approx(expected, rel=1e-4), layer
    assert metrics["eval_loss"] == pytest.approx(metrics["eval_layer_loss_3"], rel=1e-5)


class OfVectors(torch.nn.Module):
    """A module of one's own, without a config."""

    def __init__(self, score, as_tuple):
        super().__init__()
        self.embed, self.head = torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)
        layers = (torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(3))
        self.layers, self.score, self.as_tuple = torch.nn.ModuleList(layers), score, as_tuple

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
    trainer = DescentTrainer(OfVectors(score, as_tuple), args, train_dataset=data, eval_dataset=data)
    trainer.train()
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
    make, _, row = TASKS["mixture"]
    finals = []
    for trainer_class in (transformers.Trainer, DescentTrainer):
        torch.manual_seed(0)
        model, generator = make(), torch.Generator().manual_seed(0)
        data = [row(generator) for _ in range(32)]
        args = config(tmp_path, max_steps=3, dual_warmup_steps=3, learning_rate=1e-3)
        transformers.set_seed(0)
        trainer_class(model, args, train_dataset=data).train()
        finals.append(model)
    for (name, a), b in zip(finals[0].named_parameters(), finals[1].parameters()):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6, msg=name)


def test_layer_drop_is_refused_in_training(tmp_path):
    torch.manual_seed(0)
    model = transformers.BartForConditionalGeneration(
        transformers.BartConfig(
            vocab_size=VOCAB, d_model=16, encoder_layers=2, decoder_layers=3, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, decoder_layerdrop=0.2,
        )
    )  # fmt: skip
    data = [{"input_ids": torch.arange(4, 12), "labels": torch.arange(4, 12)}] * 8
    with pytest.raises(ValueError, match="layerdrop"):
        DescentTrainer(model, config(tmp_path), train_dataset=data).train()
