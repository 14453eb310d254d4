"""Healing: what is trained and what is not, its loss by plain logits, and the model that comes of it."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from architectures import MODELS, build
from noisy import t5, vit
from tiny.data import batches, classification_data, language_data
from tiny.models import VOCAB, bert, gpt2, llama, spread
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    LlamaForCausalLM,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
    ViTConfig,
)

from hf_descent import compat
from hf_descent.early_exit import HealingTrainer, keep_layers, layer_set_profile
from hf_descent.early_exit.divergence import HeadInput, token_divergences
from hf_descent.models import ViTDenoiserConfig, ViTForDenoising
from hf_descent.readout.tiles import HeadLoss


def arguments(folder, **settings):
    quiet = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    usual = {
        "max_steps": 3,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-2,
        "logging_steps": 1,
    }
    return TrainingArguments(str(folder), **{**quiet, **usual, **settings})  # fmt: skip


def images(count=16):
    generator = torch.Generator().manual_seed(0)
    return [
        {"pixel_values": torch.randn(3, 8, 8, generator=generator), "labels": number % 2}
        for number in range(count)
    ]


def pairs(count=16):
    """Sources and targets of an encoder-decoder."""
    return [{**row, "labels": row["input_ids"]} for row in language_data(count, ragged=False)]


def gemma2():
    model = build("Gemma2ForCausalLM", MODELS["Gemma2ForCausalLM"] | {"num_hidden_layers": 4})
    assert model.config.final_logit_softcapping == 5.0
    return model


CASES = {
    "bert": (lambda: spread(bert(num_layers=4)), classification_data),
    "llama": (lambda: spread(llama(num_layers=4)), language_data),
    "gpt2": (lambda: spread(gpt2(num_layers=4)), language_data),
    "gemma2": (gemma2, language_data),
    "t5": (lambda: spread(t5(num_decoder_layers=4)), pairs),
    "vit": (lambda: spread(vit(num_hidden_layers=4)), images),
}


def predictions(model, batch):
    """Logits and the labels that they predict, by the model's own forward."""
    logits = model(**batch).logits
    labels = batch["labels"]
    if labels.dim() == 2 and not model.config.is_encoder_decoder:
        return logits[:, :-1], labels[:, 1:]
    return logits, labels


def naive_loss(whole, short, batch):
    """The mean divergence over all labelled items, by the logits of both."""
    with torch.no_grad():
        target, labels = predictions(whole.eval(), batch)
        logits, _ = predictions(short.eval(), batch)
    losses = F.kl_div(
        logits.double().log_softmax(-1),
        target.double().log_softmax(-1),
        reduction="none",
        log_target=True,
    )
    return losses.sum(-1)[labels != -100].mean().item()


def healing(case, folder, layers=(1, 2, 4), settings=None, **given):
    make, data = CASES[case]
    args = arguments(folder, **(settings or {}))
    return HealingTrainer(make(), args, layers=layers, train_dataset=data(16), **given), data


@pytest.mark.parametrize("train_all", [False, True])
@pytest.mark.parametrize("has_kernel", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_the_loss_is_the_divergence_of_all_logits(
    case, has_kernel, train_all, tmp_path, monkeypatch
):
    if not has_kernel:
        monkeypatch.setattr(compat, "chunked_divergence", lambda: None)
        monkeypatch.setattr("hf_descent.early_exit.divergence.chunked_divergence", lambda: None)
        monkeypatch.setattr("hf_descent.early_exit.divergence.TILE_ELEMENTS", {"cpu": 7 * VOCAB})
    elif compat.chunked_divergence() is None:
        pytest.skip("TRL has no such kernel")
    trainer, data = healing(case, tmp_path, train_all=train_all)
    batch = next(batches(data(8, seed=1) if case in ("bert", "llama") else data(8)))
    short = copy.deepcopy(trainer.model)
    expected = naive_loss(trainer.whole_model, short, batch)
    found = trainer.compute_loss(trainer.model.eval(), batch)
    assert expected > 1e-3
    assert found.item() == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_all_logits(case, tmp_path):
    trainer, data = healing(case, tmp_path)
    batch = next(batches(data(8)))
    trainer.compute_loss(trainer.model.eval(), batch).backward()
    found = {n: p.grad for n, p in trainer.model.named_parameters() if p.requires_grad}
    naive = copy.deepcopy(trainer.model).requires_grad_(True)
    naive.zero_grad()
    logits, labels = predictions(naive, batch)
    with torch.no_grad():
        target, _ = predictions(trainer.whole_model, batch)
    kept = labels != -100
    losses = F.kl_div(logits[kept].log_softmax(-1), target[kept].softmax(-1), reduction="batchmean")
    losses.backward()
    assert found
    for name, parameter in naive.named_parameters():
        if name in found:
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-5)


def layers_of(model):
    """The list of a model's layers; of an encoder-decoder the decoder's."""
    if isinstance(model, T5ForConditionalGeneration):
        return model.decoder.block
    return next(
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and len(module) in (3, 4)
    )


@pytest.mark.parametrize("case", CASES)
def test_only_what_follows_the_gap_is_trained(case, tmp_path):
    trainer, _ = healing(case, tmp_path)
    whole = copy.deepcopy(trainer.whole_model.state_dict())
    before = copy.deepcopy(trainer.model.state_dict())
    last = {id(p) for p in layers_of(trainer.model)[2].parameters()}
    trains = {n for n, p in trainer.model.named_parameters() if id(p) in last}
    trainer.train()
    after = trainer.model.state_dict()
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed
    assert {name for name, _ in trainer.model.named_parameters()} & changed <= trains
    for name, value in trainer.whole_model.state_dict().items():
        assert torch.equal(value, whole[name]), name


def test_all_weights_are_trained_where_asked_for(tmp_path):
    trainer, _ = healing("llama", tmp_path, layers=(1, 2), train_all=True)
    before = copy.deepcopy(trainer.model.state_dict())
    whole = copy.deepcopy(trainer.whole_model.state_dict())
    trainer.train()
    changed = [n for n, v in trainer.model.state_dict().items() if not torch.equal(v, before[n])]
    assert set(changed) == set(before)
    for name, value in trainer.whole_model.state_dict().items():
        assert torch.equal(value, whole[name])


AUTO = {
    "bert": AutoModelForSequenceClassification,
    "llama": AutoModelForCausalLM,
    "vit": AutoModelForImageClassification,
}


@pytest.mark.parametrize("case", AUTO)
def test_the_healed_model_is_an_ordinary_checkpoint_and_nearer(case, tmp_path):
    trainer, data = healing(case, tmp_path / "run", settings={"max_steps": 40})
    batch = next(batches(data(16), size=16))
    before = naive_loss(trainer.whole_model, trainer.model, batch)
    trainer.train()
    trainer.save_model(tmp_path / "healed")
    loaded = AUTO[case].from_pretrained(tmp_path / "healed")
    assert type(loaded) is type(trainer.whole_model)
    assert loaded.config.num_hidden_layers == 3
    assert naive_loss(trainer.whole_model, loaded, batch) < 0.7 * before


def test_evaluation_gives_the_divergence_on_other_rows(tmp_path):
    trainer, _ = healing("llama", tmp_path, eval_dataset=language_data(8, seed=5))
    found = trainer.evaluate()["eval_loss"]
    batch = next(batches(language_data(8, seed=5)))
    expected = naive_loss(trainer.whole_model, trainer.model, batch)
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("case", ["bert", "llama"])
def test_metrics_get_the_logits_of_the_shorter_model(case, tmp_path):
    seen = []

    def metrics(prediction):
        seen.append(prediction)
        return {"accuracy": 1.0}

    data = CASES[case][1]
    trainer, _ = healing(case, tmp_path, eval_dataset=data(8), compute_metrics=metrics)
    assert trainer.evaluate()["eval_accuracy"] == 1.0
    with torch.no_grad():
        logits = trainer.model(**next(batches(data(8)))).logits
    np.testing.assert_allclose(seen[0].predictions, logits.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", ["bert", "llama"])
def test_small_batches_add_up_to_a_large_one(case, tmp_path):
    whole = {"max_steps": 2, "max_grad_norm": 0.0, "optim": "sgd", "per_device_train_batch_size": 8}
    split = whole | {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}
    weights = []
    for number, settings in enumerate((whole, split)):
        trainer, _ = healing(case, tmp_path / str(number), settings=settings)
        trainer.train()
        weights.append(trainer.model.state_dict())
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-6)


def test_checkpointed_activations_change_nothing(tmp_path):
    weights = []
    for checkpoints in (False, True):
        settings = {"gradient_checkpointing": checkpoints}
        trainer, _ = healing("llama", tmp_path / str(checkpoints), (1, 3, 4), settings)
        trainer.train()
        weights.append(trainer.model.state_dict())
    torch.testing.assert_close(*weights)


def test_mixed_precision_is_near_full_precision(tmp_path):
    losses = []
    for bf16 in (False, True):
        trainer, _ = healing("llama", tmp_path / str(bf16), settings={"bf16": bf16})
        trainer.train()
        losses.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
    np.testing.assert_allclose(losses[1], losses[0], rtol=0.1)
    assert losses[0] != losses[1]


def test_a_run_goes_on_from_its_checkpoint(tmp_path):
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    through, _ = healing("llama", tmp_path / "run", settings=settings, token_fraction=0.5)
    through.train()
    resumed, _ = healing("llama", tmp_path / "run", settings=settings, token_fraction=0.5)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    torch.testing.assert_close(
        resumed.model.state_dict(), through.model.state_dict(), rtol=0, atol=0
    )


def test_a_share_of_the_tokens_is_an_unbiased_sample(tmp_path):
    trainer, _ = healing("llama", tmp_path, token_fraction=0.25)
    batch = next(batches(language_data(8)))
    expected = naive_loss(trainer.whole_model, trainer.model, batch)
    torch.manual_seed(0)
    model = trainer.model.eval()
    with torch.no_grad():
        found = [trainer.compute_loss(model, batch).item() for _ in range(400)]
        items = batch["labels"][:, 1:].ne(-100).sum()
        torch.manual_seed(0)
        scaled = trainer.compute_loss(model, batch, num_items_in_batch=2 * items).item()
    assert len(set(found)) > 300
    assert np.mean(found) == pytest.approx(expected, abs=3 * np.std(found) / 20)
    assert scaled == pytest.approx(found[0] / 2, rel=1e-5)


def test_numbers_are_compared_by_their_squared_difference(tmp_path):
    sizes = {"hidden_size": 48, "intermediate_size": 24, "image_size": 16, "patch_size": 4}
    encoder = ViTConfig(num_hidden_layers=3, num_attention_heads=2, **sizes)
    whole = spread(ViTForDenoising(ViTDenoiserConfig(encoder_config=encoder)))
    pixels = torch.rand(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    rows = [{"pixel_values": image, "labels": image} for image in pixels]
    trainer = HealingTrainer(whole, arguments(tmp_path), layers=[1, 3], train_dataset=rows)
    batch = next(batches(rows))
    with torch.no_grad():
        found = trainer.compute_loss(trainer.model.eval(), batch).item()
        outputs = [model(**batch)[1] for model in (whole, trainer.model)]
    assert found == pytest.approx(F.mse_loss(*outputs).item(), rel=1e-5)
    trainer.train()


def test_the_trainer_is_trainer_but_for_its_loss():
    own = {name for name in vars(HealingTrainer) if name in dir(Trainer)}
    assert own - {"__init__", "__doc__", "__module__"} == {"compute_loss"}


@pytest.mark.parametrize(
    ("layers", "given", "message"),
    [
        ([1, 2, 3, 4], {}, "no layer is left out"),
        ([1, 2], {}, r"no layer follows .* Add layer 4, or give `exit_head` or `train_all=True`"),
        ([2, 1], {}, "give increasing numbers from 1 to 4"),
        ([1, 4], {"token_fraction": 0.0}, r"`token_fraction` is 0.0; give a share in \(0, 1\]"),
    ],
)
def test_what_cannot_be_healed_is_refused(layers, given, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        healing("llama", tmp_path, layers, **given)


def test_rows_without_labels_are_refused(tmp_path):
    rows = [{k: v for k, v in row.items() if k != "labels"} for row in language_data(8)]
    trainer = HealingTrainer(
        llama(num_layers=3), arguments(tmp_path), layers=[1, 3], train_dataset=rows
    )
    with pytest.raises(ValueError, match="no labels, which say what is read: add `labels`"):
        trainer.train()


def test_several_labels_a_row_are_refused(tmp_path):
    model = bert(num_layers=3, problem_type="multi_label_classification")
    rows = [{**row, "labels": torch.rand(3).round()} for row in classification_data(8)]
    trainer = HealingTrainer(model, arguments(tmp_path), layers=[1, 3], train_dataset=rows)
    with pytest.raises(ValueError, match="several labels an example.*`keep_layers`"):
        trainer.train()


def test_a_share_of_tokens_is_for_language_models(tmp_path):
    trainer, _ = healing("bert", tmp_path, token_fraction=0.5)
    with pytest.raises(ValueError, match=r"`token_fraction` is 0.5; .* use 1"):
        trainer.train()


@pytest.mark.parametrize("form", [HeadLoss(), HeadLoss(logit_scale=0.3), HeadLoss(softcap=2.0)])
@pytest.mark.parametrize("has_kernel", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_divergences_of_tokens_by_all_logits(form, has_kernel, bias, monkeypatch):
    if not has_kernel:
        monkeypatch.setattr("hf_descent.early_exit.divergence.chunked_divergence", lambda: None)
        monkeypatch.setattr("hf_descent.early_exit.divergence.TILE_ELEMENTS", {"cpu": 100})
    torch.manual_seed(0)
    heads = [nn.Linear(8, 30, bias=bias) for _ in range(2)]
    states = [3 * torch.randn(11, 8) for _ in range(2)]
    states[1].requires_grad_()
    read = [HeadInput(hidden, head) for hidden, head in zip(states, heads)]
    weights = torch.rand(11)
    found = token_divergences(*read, form)
    (found * weights).sum().backward()
    gradients = [states[1].grad, heads[1].weight.grad]

    def logits(hidden, head):
        scores = form.logit_scale * head(hidden)
        return scores if form.softcap is None else form.softcap * (scores / form.softcap).tanh()

    hidden = states[1].detach().requires_grad_()
    weight = heads[1].weight.detach().requires_grad_()
    heads[1].weight = nn.Parameter(weight)
    p, q = logits(states[0], heads[0]).softmax(-1).detach(), logits(hidden, heads[1]).softmax(-1)
    expected = (p * (p.log() - q.log())).sum(-1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    own = torch.autograd.grad((expected * weights).sum(), [hidden, heads[1].weight])
    torch.testing.assert_close(gradients, list(own), rtol=1e-4, atol=1e-6)


def test_no_logits_of_all_tokens_are_made(tmp_path, monkeypatch):
    """Of a head with many classes; the tiles are of 64 numbers."""
    monkeypatch.setattr("hf_descent.early_exit.divergence.chunked_divergence", lambda: None)
    monkeypatch.setattr("hf_descent.early_exit.divergence.TILE_ELEMENTS", {"cpu": 3 * VOCAB})
    trainer, _ = healing("llama", tmp_path)
    batch = next(batches(language_data(8)))
    trainer.compute_loss(trainer.model, batch)  # finds out how it is read
    rows = []
    forward = nn.Linear.forward

    def watched(self, hidden):
        if self.out_features == VOCAB:
            rows.append(hidden.flatten(0, -2).shape[0])
        return forward(self, hidden)

    monkeypatch.setattr(nn.Linear, "forward", watched)
    trainer.compute_loss(trainer.model, batch).backward()
    assert rows and max(rows) == 3


def test_the_shared_layers_run_once(tmp_path):
    trainer, _ = healing("llama", tmp_path, layers=(1, 2, 4))
    batch = next(batches(language_data(8)))
    trainer.compute_loss(trainer.model, batch)
    counts = []
    for layer in [*layers_of(trainer.model), *layers_of(trainer.whole_model)]:
        layer.mlp.register_forward_hook(lambda *_, layer=layer: counts.append(id(layer)))
    trainer.compute_loss(trainer.model, batch)
    short, whole = layers_of(trainer.model), layers_of(trainer.whole_model)
    assert counts == [*map(id, whole), id(short[2])]


def test_a_block_behind_layer_k_is_the_set_with_the_last_layer(tmp_path):
    whole = spread(llama(num_layers=4))
    trainer = HealingTrainer(
        whole, arguments(tmp_path), layers=[1, 2, 4], train_dataset=language_data(8)
    )
    assert isinstance(trainer.model, LlamaForCausalLM)
    short = keep_layers(whole, [1, 2, 4])
    for name, value in short.state_dict().items():
        assert torch.equal(trainer.model.state_dict()[name], value)
    own, last = trainer.model.model.layers[2], whole.model.layers[3]
    for parameter, other in zip(own.parameters(), last.parameters()):
        assert torch.equal(parameter, other) and parameter.requires_grad
    assert parameter.data_ptr() != other.data_ptr()


@pytest.mark.parametrize("case", ["bert", "llama"])
def test_the_healed_model_is_judged_beside_the_whole_one(case, tmp_path):
    data = CASES[case][1]
    rows = data(40, seed=7)
    trainer, _ = healing(case, tmp_path, eval_dataset=rows)
    trainer.train()
    profile = trainer.evaluate_layers(max_rise=0.5)
    assert profile.layers == [[1, 2, 3, 4], [1, 2, 4]]
    assert profile.healed == [False, True]

    sums = np.zeros(2)
    same = count = 0
    with torch.no_grad():
        for batch in batches(rows, size=1):
            whole, labels = predictions(trainer.whole_model.eval(), batch)
            short, _ = predictions(trainer.model.eval(), batch)
            kept = labels != -100
            for place, logits in enumerate((whole, short)):
                sums[place] += F.cross_entropy(logits[kept], labels[kept], reduction="sum").item()
            same += int((whole.argmax(-1) == short.argmax(-1))[kept].sum())
            count += int(kept.sum())
    np.testing.assert_allclose(profile.losses, sums / count, rtol=1e-4)
    np.testing.assert_allclose(profile.agreement, [1.0, same / count], rtol=1e-6)
    assert profile.lower[1] < profile.ratios[1] < profile.upper[1]
    assert "3, healed" in str(profile) and "as all layers" in str(profile)
    assert profile.smallest(1e6) in ([1, 2, 4], [1, 2, 3, 4])


def test_sets_are_judged_before_and_after_healing_together(tmp_path):
    trainer, data = healing("bert", tmp_path)
    trainer.train()
    layers = [[1, 2, 4], [1, 2, 4]]
    rows = data(30, seed=3)
    profile = layer_set_profile(trainer.whole_model, rows, layers, healed=[None, trainer.model])
    plain = layer_set_profile(trainer.whole_model, rows, layers[:1])
    assert profile.healed == [False, False, True]
    np.testing.assert_allclose(profile.losses[:2], plain.losses)
    assert profile.losses[2] != profile.losses[1]


def test_an_evaluation_needs_rows(tmp_path):
    trainer, _ = healing("bert", tmp_path)
    with pytest.raises(ValueError, match="no `eval_dataset`; give data"):
        trainer.evaluate_layers()
