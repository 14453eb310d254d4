"""Exit heads in front of the shared head: their loss by plain logits, what is trained, and the model that is saved."""

import copy

import pytest
import torch
import torch.nn.functional as F
from test_healing import CASES, arguments, layers_of, naive_loss, predictions
from tiny.data import batches, language_data
from tiny.models import bert, llama, spread
from tiny.training import config, trained
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
)

from hf_descent.early_exit import HealingTrainer, keep_layers
from hf_descent.early_exit.heads import AffineMap, untie


AUTO = {
    "bert": AutoModelForSequenceClassification,
    "llama": AutoModelForCausalLM,
    "gpt2": AutoModelForCausalLM,
    "gemma2": AutoModelForCausalLM,
    "t5": AutoModelForSeq2SeqLM,
    "vit": AutoModelForImageClassification,
}
# What stands behind the layers: the norm, and the linear layer that reads what it makes.
TAILS = {
    "bert": (None, "bert.pooler.dense"),
    "llama": ("model.norm", "lm_head"),
    "gpt2": ("transformer.ln_f", "lm_head"),
    "gemma2": ("model.norm", "lm_head"),
    "t5": ("decoder.final_layer_norm", "lm_head"),
    "vit": ("vit.layernorm", "classifier"),
}
NORMS = [case for case, (norm, _) in TAILS.items() if norm]


def exiting(case, folder, exit_head, layers=(1, 2), settings=None, **given):
    make, data = CASES[case]
    args = arguments(folder, **(settings or {}))
    rows = data(16)
    trainer = HealingTrainer(
        make(), args, layers=layers, exit_head=exit_head, train_dataset=rows, **given
    )
    return trainer, rows


def batch_of(rows):
    return next(batches(rows, size=16))


def moved(trainer):
    """The trainer, whose map is none of the identity."""
    for module in trainer.model.modules():
        if isinstance(module, AffineMap):
            nn.init.normal_(module.weight, std=0.1)
    return trainer


HEADS = [(case, "affine") for case in TAILS] + [(case, "norm") for case in NORMS]


@pytest.mark.parametrize(("case", "exit_head"), HEADS)
def test_the_loss_is_the_divergence_of_all_logits(case, exit_head, tmp_path):
    trainer, rows = exiting(case, tmp_path, exit_head)
    batch = batch_of(rows)
    expected = naive_loss(
        trainer.whole_model, keep_layers(trainer.whole_model, [1, 2], batch), batch
    )
    model = trainer.model.eval()
    assert trainer.compute_loss(model, batch).item() == pytest.approx(expected, rel=1e-5)
    moved(trainer)
    expected = naive_loss(trainer.whole_model, model, batch)
    assert trainer.compute_loss(model, batch).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("case", TAILS)
def test_a_map_in_front_of_the_head_is_saved_as_a_part_of_its_weight(case, tmp_path):
    trainer, rows = exiting(case, tmp_path / "run", "affine")
    batch = batch_of(rows)
    moved(trainer)
    (map_of_rows,) = [
        module.weight.detach().clone()
        for module in trainer.model.modules()
        if isinstance(module, AffineMap)
    ]
    trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
    assert type(trainer.model.get_submodule(TAILS[case][1])) is nn.Linear
    trainer.save_model(tmp_path / "saved")
    loaded = AUTO[case].from_pretrained(tmp_path / "saved").eval()
    assert type(loaded) is type(trainer.whole_model)

    def mapped(module, args):
        return (args[0] + args[0] @ map_of_rows,)

    short = keep_layers(trainer.whole_model, [1, 2], batch).eval()
    with torch.no_grad():
        found, _ = predictions(loaded, batch)
        short.get_submodule(TAILS[case][1]).register_forward_pre_hook(mapped)
        expected, _ = predictions(short, batch)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("case", "exit_head"), HEADS)
def test_only_the_head_is_trained_and_the_saved_model_loads(case, exit_head, tmp_path):
    settings = {"max_steps": 30, "learning_rate": 3e-3}
    trainer, rows = exiting(case, tmp_path / "run", exit_head, settings=settings)
    whole = copy.deepcopy(trainer.whole_model.state_dict())
    batch = batch_of(rows)
    before = keep_layers(trainer.whole_model, [1, 2], batch)
    loss = naive_loss(trainer.whole_model, before, batch)
    trainer.train()
    trainer.save_model(tmp_path / "saved")

    loaded = AUTO[case].from_pretrained(tmp_path / "saved")
    own = before.state_dict()
    changed = {n for n, v in loaded.state_dict().items() if not torch.equal(v, own[n])}
    place = TAILS[case][exit_head == "affine"]
    assert changed and {name.rpartition(".")[0] for name in changed} == {place}
    assert len(layers_of(loaded)) == 2 if case == "t5" else loaded.config.num_hidden_layers == 2
    for name, value in trainer.whole_model.state_dict().items():
        assert torch.equal(value, whole[name]), name
    assert naive_loss(trainer.whole_model, loaded, batch) < loss
    found, _ = predictions(loaded.eval(), batch)
    expected, _ = predictions(trainer.model.eval(), batch)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


WITH_ALL = [
    ("bert", "affine"),
    ("bert", "block"),
    ("gpt2", "norm"),
    ("gpt2", "affine"),
    ("gpt2", "block"),
]


@pytest.mark.parametrize(("case", "exit_head"), WITH_ALL)
def test_the_layers_below_train_with_the_head_and_the_whole_model_stays(case, exit_head, tmp_path):
    settings = {"max_steps": 30, "learning_rate": 3e-3}
    trainer, rows = exiting(case, tmp_path, exit_head, settings=settings, train_all=True)
    whole = copy.deepcopy(trainer.whole_model)
    batch = batch_of(rows)
    before = keep_layers(whole, trainer.layers, batch)
    loss = naive_loss(whole, before, batch)
    assert trainer.compute_loss(trainer.model.eval(), batch).item() == pytest.approx(loss, rel=1e-5)
    assert all(weight.requires_grad for weight in trainer.model.parameters())

    trainer.train()
    trainer.save_model(tmp_path / "saved")
    loaded = AUTO[case].from_pretrained(tmp_path / "saved")

    assert type(loaded) is type(whole)
    own = before.state_dict()
    unchanged = {n for n, weight in loaded.named_parameters() if torch.equal(weight, own[n])}
    assert not unchanged
    teacher = trainer.whole_model.state_dict()
    torch.testing.assert_close(teacher, whole.state_dict(), rtol=0, atol=0)
    found, _ = predictions(loaded.eval(), batch)
    expected, _ = predictions(trainer.model.eval(), batch)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert naive_loss(whole, loaded, batch) < 0.7 * loss


@pytest.mark.parametrize("case", ["bert", "gpt2"])
def test_a_map_and_the_layers_below_it_get_the_gradients_of_all_logits(case, tmp_path):
    trainer, rows = exiting(case, tmp_path, "affine", train_all=True)
    moved(trainer)
    batch = batch_of(rows)
    naive = copy.deepcopy(trainer.model).eval()
    trainer.compute_loss(trainer.model.eval(), batch).backward()

    with torch.no_grad():
        target, labels = predictions(trainer.whole_model.eval(), batch)
    logits, _ = predictions(naive, batch)
    kept = labels != -100
    log_shares = logits[kept].log_softmax(-1)
    F.kl_div(log_shares, target[kept].softmax(-1), reduction="batchmean").backward()

    found = dict(trainer.model.named_parameters())
    for name, parameter in naive.named_parameters():
        torch.testing.assert_close(found[name].grad, parameter.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("exit_head", ["affine", "block"])
def test_a_model_with_an_exit_head_goes_on_with_labels_under_constraints(exit_head, tmp_path):
    healing, rows = exiting("gpt2", tmp_path / "healing", exit_head, train_all=True)
    healing.train()
    args = config(tmp_path / "descent", descent_alpha=None, exit_targets={1: 0.5})
    trainer = trained(healing.model, args, train_dataset=rows)
    assert trainer.multipliers.values.item() > 0

    trainer.save_model(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    with torch.no_grad():
        found, _ = predictions(loaded, batch_of(rows))
        expected, _ = predictions(trainer.model.eval(), batch_of(rows))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_block_is_a_copy_of_the_last_layer_behind_those_that_are_kept(tmp_path):
    weights = []
    for number, given in enumerate(
        ({"layers": [1, 2], "exit_head": "block"}, {"layers": [1, 2, 4]})
    ):
        whole = spread(llama(num_layers=4))
        args = arguments(tmp_path / str(number))
        trainer = HealingTrainer(whole, args, train_dataset=language_data(16), **given)
        assert trainer.layers == [1, 2, 4]
        trainer.train()
        weights.append(trainer.model.state_dict())
    torch.testing.assert_close(*weights, rtol=0, atol=0)


def test_a_run_with_a_map_goes_on_from_its_checkpoint(tmp_path):
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    through, _ = exiting("gpt2", tmp_path, "affine", settings=settings)
    through.train()
    resumed, _ = exiting("gpt2", tmp_path, "affine", settings=settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    torch.testing.assert_close(
        resumed.model.state_dict(), through.model.state_dict(), rtol=0, atol=0
    )


def test_a_head_that_does_not_let_go_of_the_embeddings_is_refused():
    model = spread(llama(num_layers=2))
    model.lm_head.weight = model.model.embed_tokens.weight
    model.tie_weights = lambda: setattr(model.lm_head, "weight", model.model.embed_tokens.weight)
    with pytest.raises(ValueError, match="no head apart from its embeddings.*`exit_head='block'`"):
        untie(model, model.lm_head, batch_of(language_data(4)))


@pytest.mark.parametrize(
    ("make", "given", "message"),
    [
        (llama, {"exit_head": "mlp"}, "`exit_head` is 'mlp'; choose of norm, affine, block"),
        (bert, {"exit_head": "norm"}, "Bert.* has none behind its layers: use 'affine' or 'block'"),
        (bert, {"exit_head": "norm", "train_all": True}, "Bert.* has none behind its layers"),
        (llama, {"exit_head": "block", "layers": [1, 3]}, "a copy of layer 3: leave that layer"),
        (llama, {"exit_head": "affine", "layers": [1, 2, 3]}, "no layer is left out"),
    ],
)
def test_other_heads_are_refused(make, given, message, tmp_path):
    given = {"layers": [1, 2]} | given
    with pytest.raises(ValueError, match=message):
        HealingTrainer(make(num_layers=3), arguments(tmp_path), **given)
