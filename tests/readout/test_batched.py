"""All layers read by one run of a model's tail: equal to one by one, or not done."""

import random
from types import SimpleNamespace

import pytest
import torch
from architectures import AUDIO, FAMILIES, MODELS, TEXT, TwoStage, batch_for, build
from launches import KernelCount
from peft import LoraConfig, get_peft_model
from tiny.data import batches, classification_data, language_data
from tiny.models import bert, gpt2
from tiny.training import config, trained
from torch import nn
from transformers import set_seed

from hf_descent import DescentObjective, layer_losses
from hf_descent.configs import DescentArguments
from hf_descent.readout import batched
from hf_descent.readout.head import HeadReadout
from hf_descent.readout.replay import Readout, output_logits


def score(outputs):
    return output_logits(outputs).float().square().mean()


def scores_and_gradients(model, batch, readout, no_grad_layers=(), score=score):
    """Scores of the layers in train mode, the gradients of a weighted sum of them, and a draw after it."""
    scores = []
    model.train()
    model.zero_grad()
    set_seed(3)
    with readout.attach(
        lambda layer, found, hidden: scores.append(found), None, no_grad_layers, score
    ):
        model(**batch)
    draw = torch.rand(3)
    sum(layer * found for layer, found in enumerate(scores, start=1)).backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return torch.stack(scores).detach(), gradients, draw


def assert_equal(found, expected, gradient_bound=1e-6):
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=1e-6)
    for one, other in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=gradient_bound)
    assert torch.equal(found[2], expected[2])


@pytest.fixture
def runs(monkeypatch):
    """How many layers each run has read that was for several."""
    sizes = []
    run_together = batched.run_together

    def run(function, layer_outputs):
        found = run_together(function, layer_outputs)
        sizes.append(len(layer_outputs))
        return found

    monkeypatch.setattr("hf_descent.readout.replay.run_together", run)
    return sizes


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in FAMILIES else pytest.mark.slow) for name in MODELS],
)
def test_equals_one_by_one_with_dropout(name, runs):
    fields = MODELS[name]
    model = build(name, fields | {"layerdrop": 0.0} if fields == AUDIO else fields)
    batch = batch_for(model)
    readout = Readout.probe(model, batch)
    expected = scores_and_gradients(model, batch, readout)
    readout.check_batching(batch, score)
    readout.check_joining(batch, score)
    assert readout.is_batched and readout.joins_last
    runs.clear()
    # Gradients of ViT go up to 15, of which float32 has no digits below 1e-6.
    bound = 2e-6 if name == "ViTForImageClassification" else 1e-6
    assert_equal(scores_and_gradients(model, batch, readout), expected, bound)
    assert runs == [readout.num_layers]


def test_layers_without_weight_get_no_gradient(runs):
    model = build("BertForSequenceClassification", TEXT | {"num_hidden_layers": 6})
    batch = batch_for(model)
    readout = Readout.probe(model, batch)
    expected = scores_and_gradients(model, batch, readout, no_grad_layers=[1, 3, 5])
    readout.check_batching(batch, score)
    readout.check_joining(batch, score)
    runs.clear()
    found = scores_and_gradients(model, batch, readout, no_grad_layers=[1, 3, 5])
    assert_equal(found, expected)
    assert runs == [3, 3]


@pytest.mark.parametrize(
    "settings",
    [{}, {"ignore_index": 1}, {"reduction": "sum"}, {"label_smoothing": 0.1}, {"weight": None}],
    ids=str,
)
def test_the_loss_of_a_batch_of_layers_is_that_of_each(settings):
    torch.manual_seed(0)
    logits = torch.randn(3, 6, 4, requires_grad=True)  # [layers, rows, classes]
    labels = torch.tensor([0, 3, -100, 1, 2, 0])
    if "ignore_index" in settings:
        labels = labels.clamp(min=0)

    def loss(of_layer):
        return batched.quick_cross_entropy(of_layer, labels, **settings)

    found = torch.func.vmap(loss)(logits)
    expected = [nn.functional.cross_entropy(each, labels, **settings) for each in logits]
    expected = torch.stack(expected)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    gradients = [torch.autograd.grad(losses.sum(), logits)[0] for losses in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("is_half", [True, False])
def test_a_linear_layer_of_a_batch_of_layers_is_that_of_torch(has_bias, is_half):
    torch.manual_seed(0)
    inputs = torch.randn(3, 6, 4, requires_grad=True)  # [layers, rows, width]
    weight = torch.randn(5, 4, requires_grad=True)
    bias = torch.randn(5, requires_grad=True) if has_bias else None
    sources = [source for source in (inputs, weight, bias) if source is not None]

    def results_of(linear):
        with KernelCount() as counted:
            with torch.autocast("cpu", torch.bfloat16, enabled=is_half):
                outputs = torch.func.vmap(linear, in_dims=(0, None, None))(inputs, weight, bias)
            gradients = torch.autograd.grad(outputs.float().square().sum(), sources)
        return outputs, gradients, counted.kernels

    outputs, gradients, kernels = results_of(batched.quick_linear)
    expected, expected_gradients, most = results_of(nn.functional.linear)
    assert outputs.dtype == expected.dtype and torch.equal(outputs, expected)
    for found, own in zip(gradients, expected_gradients, strict=True):
        assert torch.equal(found, own)
    assert kernels <= most


@pytest.mark.parametrize("name", ["linear", "cross_entropy"])
def test_a_function_of_another_library_stays_in_its_place(name, monkeypatch):
    own = getattr(nn.functional, name)
    calls = []

    def other(*args, **kwargs):
        calls.append(name)
        return 2 * own(*args, **kwargs)

    model = build("BertForSequenceClassification", TEXT | {"num_hidden_layers": 4})
    batch = batch_for(model, with_labels=True)
    readout = Readout.probe(model, batch)
    readout.check_batching(batch, lambda outputs: outputs["loss"])
    assert readout.is_batched
    monkeypatch.setattr(nn.functional, name, other)
    with torch.no_grad():
        found = torch.stack(readout.layer_scores(batch, lambda outputs: outputs["loss"]))
        assert getattr(nn.functional, name) is other and calls
        readout.is_batched = False
        expected = torch.stack(readout.layer_scores(batch, lambda outputs: outputs["loss"]))
    torch.testing.assert_close(found, expected)


def test_threads_that_read_at_once_leave_the_functions_of_torch():
    own = nn.functional.linear
    first, second = batched.quick_functions(), batched.quick_functions()
    first.__enter__()
    assert nn.functional.linear is batched.quick_linear
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert nn.functional.linear is own


class Branching(TwoStage):
    """A tail that asks for a value, of which a single run for several layers has more than one."""

    def forward(self, x, fails=False):
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        if fails and hidden.sum() > 1e9:
            hidden = -hidden
        return {"logits": self.head(hidden)}


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class OwnFunction(TwoStage):
    def forward(self, x):
        return {"logits": Doubled.apply(super().forward(x)["logits"])}


def test_a_tail_that_branches_on_values_is_read_one_by_one(runs):
    torch.manual_seed(0)
    model, batch = Branching(), {"x": torch.randn(5, 4), "fails": True}
    readout = Readout.probe(model, batch)
    readout.check_batching(batch, score)
    assert not readout.is_batched and not runs
    scores_and_gradients(model, batch, readout)
    assert not runs


def test_a_function_without_a_rule_for_batches_is_read_one_by_one(runs):
    model, batch = OwnFunction(), {"x": torch.randn(5, 4)}
    readout = Readout.probe(model, batch)
    readout.check_batching(batch, score)
    assert not readout.is_batched and not runs


def test_sharded_parameters_are_read_one_by_one(runs):
    model, batch = TwoStage(), {"x": torch.randn(5, 4)}
    readout = Readout.probe(model, batch)
    model.head.weight.ds_id = 1  # as under ZeRO-3
    readout.check_batching(batch, score)
    assert not readout.is_batched and not runs


def test_lora_with_a_trained_head(runs):
    model = bert(num_layers=4, dropout=0.1)
    batch = next(batches(classification_data()))
    lora = LoraConfig(task_type="SEQ_CLS", r=2, lora_dropout=0.1, init_lora_weights=False)
    model = get_peft_model(model, lora)
    readout = Readout.probe(model, batch)
    expected = scores_and_gradients(model, batch, readout)
    readout.check_batching(batch, score)
    readout.check_joining(batch, score)
    runs.clear()
    assert_equal(scores_and_gradients(model, batch, readout), expected)
    assert runs == [4]


def test_the_own_readout_of_the_last_layer_has_no_backward_pass_beside_that_of_all():
    model = bert(num_layers=4, dropout=0.1)
    batch = next(batches(classification_data()))
    readout = Readout.probe(model, batch)
    readout.check_batching(batch, score)
    readout.check_joining(batch, score)
    passed = []
    found = []
    model.train()
    with readout.attach_loss(
        lambda outputs: outputs["loss"], lambda losses, _: found.append(losses)
    ):
        outputs = model(**batch)
    outputs["loss"].register_hook(passed.append)
    torch.testing.assert_close(found[0][-1], outputs["loss"], rtol=1e-6, atol=1e-6)
    found[0].sum().backward()
    assert not passed
    assert model.classifier.weight.grad.abs().max() > 0


class Denoising(TwoStage):
    """Draws the noise that its loss is about before the layers."""

    def forward(self, x):
        noise = torch.randn_like(x)
        hidden = self.embed(x + noise)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden)
        return {"logits": logits, "loss": (logits - noise[:, : logits.shape[1]]).square().mean()}


class Reversing(TwoStage):
    """Turns the gradient of its head around."""

    def forward(self, x):
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        hidden = self.dropout(hidden) + 0.0
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: -10 * gradient)
        logits = self.head(hidden)
        return {"logits": logits, "loss": logits.square().mean()}


class TailDraws(TwoStage):
    """Draws a number of Python's behind the layers."""

    def forward(self, x):
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        scale = random.random() if self.training else 1.0
        logits = self.head(scale * hidden)
        return {"logits": logits, "loss": logits.square().mean()}


class ExtraTerm(TwoStage):
    """Has a term of the loss that a replay leaves out."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(output_hidden_states=True)
        self.extra = nn.Linear(4, 1)

    def forward(self, x):
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden)
        loss = logits.square().mean()
        if self.config.output_hidden_states and self.training:
            loss = loss + self.extra(x).square().mean()
        return {"logits": logits, "loss": loss}


@pytest.mark.parametrize("make", [Denoising, Reversing, TailDraws, ExtraTerm])
def test_the_last_layer_stays_alone_where_a_replay_is_not_the_models_own_call(make):
    torch.manual_seed(0)
    model, batch = make(), {"x": torch.randn(5, 4)}
    before = [buffer.clone() for buffer in model.buffers()]
    readout = Readout.probe(model, batch)

    def loss(outputs):
        return outputs["loss"]

    readout.check_batching(batch, loss)
    readout.check_joining(batch, loss)
    assert readout.is_batched and not readout.joins_last
    assert all(map(torch.equal, before, model.buffers()))
    losses = []
    model.train()
    with readout.attach_loss(loss, lambda found, hidden_states: losses.append(found)):
        outputs = model(**batch)
    assert losses[0][-1] == outputs["loss"]


def test_the_last_layer_stays_alone_where_it_would_take_too_much_memory(runs, monkeypatch):
    model = bert(num_layers=4, dropout=0.1)
    batch = next(batches(classification_data()))
    readout = Readout.probe(model, batch)
    expected = scores_and_gradients(model, batch, readout)
    readout.check_batching(batch, score)
    readout.check_joining(batch, score)
    outputs = model(**batch)
    hidden = model.bert(batch["input_ids"], batch["attention_mask"]).last_hidden_state
    of_a_layer = batched.bytes_of([hidden, outputs])
    for most, read in ((4, [4]), (3, [3]), (2, [])):
        monkeypatch.setitem(batched.STACKED_BYTES, "cpu", most * of_a_layer)
        runs.clear()
        assert_equal(scores_and_gradients(model, batch, readout), expected)
        assert runs == read


def test_a_single_run_with_other_results_is_not_taken():
    model, batch = TwoStage(), {"x": torch.randn(5, 4)}
    readout = Readout.probe(model, batch)
    calls = []

    def changing(outputs):
        calls.append(outputs)
        return outputs["logits"].mean() * len(calls)

    readout.check_batching(batch, changing)
    assert not readout.is_batched


def test_another_way_through_the_tail_than_the_probes(runs):
    """The batch that was probed had no values to ask for."""
    torch.manual_seed(0)
    model, batch = Branching(), {"x": torch.randn(5, 4)}
    readout = Readout.probe(model, batch)
    expected = scores_and_gradients(model, batch | {"fails": True}, readout)
    readout.check_batching(batch, score)
    assert readout.is_batched
    runs.clear()
    assert_equal(scores_and_gradients(model, batch | {"fails": True}, readout), expected)
    assert not runs and not readout.is_batched


def test_running_out_of_memory_is_no_reason_to_go_on():
    model, batch = TwoStage(), {"x": torch.randn(5, 4)}
    readout = Readout.probe(model, batch)
    with pytest.raises(RuntimeError, match="out of memory"):
        readout.stop_batching(RuntimeError("CUDA out of memory. Tried to allocate 1 GiB"))


def test_large_outputs_are_read_one_by_one(monkeypatch, runs):
    model, batch = TwoStage(), {"x": torch.randn(5, 4)}
    readout = Readout.probe(model, batch)
    readout.check_batching(batch, score)
    own = 5 * (8 + 3) * 4  # bytes of a layer's output and of the logits

    def sizes(limit, has_grad):
        runs.clear()
        monkeypatch.setitem(batched.STACKED_BYTES, "cpu", limit)
        with torch.set_grad_enabled(has_grad), readout.attach(lambda *_: None, score=score):
            model(**batch)
        return list(runs)

    # What has a gradient is kept until the backward pass, so that parts would take as much as all of it.
    assert sizes(3 * own, True) == [3] and sizes(3 * own - 1, True) == []
    assert sizes(2 * own, False) == [2] and sizes(2 * own - 1, False) == []


def test_dropout_is_drawn_as_by_a_single_run():
    x = torch.randn(3, 4, 5)
    set_seed(0)
    expected = torch.stack([nn.functional.dropout(x[0], 0.3), x[1], x[2]])[0]
    set_seed(0)
    with batched.SameDropout():
        found = torch.func.vmap(nn.Dropout(0.3), randomness="same")(x)
    torch.testing.assert_close(found[0], expected)
    assert torch.equal(found == 0, found[:1].expand_as(found) == 0)
    with batched.SameDropout():
        assert torch.equal(nn.Dropout(0.3).eval()(x), x)


def custom_loss(outputs, labels, num_items_in_batch=None):
    logits = outputs["logits"]
    logits /= 2.0  # in place, as a user's loss may be
    return nn.functional.cross_entropy(logits, labels)


def loss_that_asks(outputs, labels, num_items_in_batch=None):
    loss = nn.functional.cross_entropy(outputs["logits"], labels)
    return loss if float(loss) < 1e9 else 0 * loss


def token_loss(outputs, labels, num_items_in_batch=None):
    logits = outputs["logits"][:, :-1].flatten(0, 1)  # [tokens, vocab]
    return nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / labels[
        :, 1:
    ].ne(-100).sum().clamp(min=1)


def pooled(model, hidden, inputs):
    return model.classifier(hidden.mean(1))


CASES = {
    "classifier": (bert, {}, {}),
    "label smoothing": (bert, {"label_smoothing_factor": 0.1}, {}),
    "custom loss": (bert, {}, {"layer_loss_fn": custom_loss}),
    "loss that asks": (bert, {}, {"layer_loss_fn": loss_that_asks}),
    "custom readout": (bert, {}, {"readout": pooled}),
    "mean readout": (bert, {}, {"readout": "mean"}),
    "checkpointing": (
        bert,
        {
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": False},
        },
        {},
    ),
    "autocast": (bert, {"bf16": True}, {}),
    "accumulation": (bert, {"gradient_accumulation_steps": 2}, {}),
    "exits": (bert, {"exit_targets": {2: 0.1}, "constrained_layers": [1]}, {}),
    "hinge": (bert, {"objective": "hinge"}, {}),
    "noise": (bert, {"noise_gamma": 0.5}, {}),
    "language model": (gpt2, {}, {"layer_loss_fn": token_loss}),
}
NOT_BATCHED = ("loss that asks",)


def run_of(kind, folder):
    make, settings, extra = CASES[kind]
    if make is bert:
        model, rows = bert(num_layers=4, dropout=0.1), classification_data()
    else:
        model, rows = gpt2(num_layers=4, resid_pdrop=0.1), language_data()
    settings = {
        "max_steps": 20,
        "initial_loss_bound": 1.2,
        "dual_warmup_steps": 2,
        # Adam would enlarge differences of gradients near 0.
        "optim": "sgd",
        "learning_rate": 0.1,
        **settings,
    }
    args = config(folder, **settings)
    trainer = trained(model, args, train_dataset=rows, eval_dataset=rows[:16], **extra)
    metrics = trainer.evaluate()
    losses = {name: value for name, value in metrics.items() if "layer_loss" in name}
    return trainer, losses, torch.rand(3)


@pytest.mark.parametrize("kind", CASES)
def test_twenty_steps_equal_those_read_one_by_one(kind, tmp_path, runs, monkeypatch):
    trainer, losses, draw = run_of(kind, tmp_path / "together")
    assert bool(runs) == (kind not in NOT_BATCHED)
    runs.clear()
    monkeypatch.setattr(Readout, "check_batching", lambda *_: None)
    other, expected, other_draw = run_of(kind, tmp_path / "alone")
    assert not runs
    tolerance = 1e-2 if kind == "autocast" else 1e-6
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(trainer.multipliers.values, other.multipliers.values, **close)
    assert trainer.multipliers.values.any() or kind == "hinge"
    assert losses == pytest.approx(expected, rel=10 * tolerance)
    torch.testing.assert_close(
        trainer.model.state_dict(),
        other.model.state_dict(),
        rtol=10 * tolerance,
        atol=10 * tolerance,
    )
    assert torch.equal(draw, other_draw)


def labelled(model, batch):
    """The batch with labels of the model's kind, two of which differ."""
    name = type(model).__name__
    if "QuestionAnswering" in name:
        return batch | {
            "start_positions": torch.tensor([1, 2]),
            "end_positions": torch.tensor([3, 5]),
        }
    if "ConditionalGeneration" in name:
        return batch | {"labels": batch["decoder_input_ids"]}
    if "LM" in name:
        return batch | {"labels": batch["input_ids"]}
    if "TokenClassification" in name:
        return batch | {"labels": batch["input_ids"] % 2}
    return batch | {"labels": torch.tensor([0, 1])}


def steps_of(name, count=20):
    """The layer losses and gradients after so many steps of a custom loop, and the multipliers."""
    fields = MODELS[name]
    model = build(name, fields | {"layerdrop": 0.0} if fields == AUDIO else fields)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # before a head that is read in tiles, masks are others
    batch = labelled(model, batch_for(model))
    args = DescentArguments(
        initial_loss_bound=10.0,
        loss_targets={1: 0.1, 2: 0.1},
        dual_warmup_steps=0,
        dual_optim="sgd",
        dual_learning_rate=0.01,
    )
    objective = DescentObjective(model, [batch], args, max_steps=count + 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    set_seed(3)
    model.train()
    for _ in range(count):
        objective(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        objective.step()

    objective(model, batch).backward()
    gradients = {path: weight.grad for path, weight in model.named_parameters()}
    model.eval()
    return torch.as_tensor(layer_losses(model, batch)), objective.multipliers.values, gradients


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in FAMILIES else pytest.mark.slow) for name in MODELS],
)
def test_twenty_steps_of_each_architecture_equal_those_of_a_loop(name, monkeypatch):
    """By one run of the tail or in tiles, against one replay for each layer."""

    def refuse(*args, **kwargs):
        raise ValueError("layers are to be read one by one")

    found = steps_of(name)
    monkeypatch.setattr(Readout, "check_batching", lambda *_: None)
    monkeypatch.setattr(HeadReadout, "probe", refuse)
    expected = steps_of(name)

    assert expected[1].all()
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
