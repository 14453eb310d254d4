"""What a forward leaves on record, and what its replays may touch."""

import copy
import random
import weakref
from collections import Counter

import numpy as np
import pytest
import torch
from architectures import AUDIO, DECODER, LAYERS, TEXT, XLM, TwoStage, batch_for, build
from torch import nn

from hf_descent.readout import random_state
from hf_descent.readout.replay import Readout, layer_logits, output_logits
from hf_descent.readout.tape import noise_is_disabled


@pytest.fixture(scope="module")
def bert():
    return build("BertForSequenceClassification", TEXT)


def test_refuses_layerdrop_in_training_only():
    model = build("Wav2Vec2ForSequenceClassification", AUDIO | {"layerdrop": 0.01})
    batch = batch_for(model)
    readout = Readout.probe(model, batch)
    model.train()
    with readout.attach(lambda *_: None), pytest.raises(ValueError, match="layerdrop"):
        model(**batch)


def test_writes_in_place_leave_the_record_and_its_gradients_intact():
    torch.manual_seed(0)
    model = TwoStage(dropout=0.5, inplace=True).train()
    x = torch.randn(5, 4)
    seen = []
    with Readout.probe(model, {"x": x}).attach(
        lambda layer, outputs, hidden: seen.append((outputs["logits"], hidden))
    ):
        model(x)
    for logits, hidden in seen[:-1]:
        assert (hidden != 0).all()
        torch.autograd.grad(logits.sum(), model.embed.weight, retain_graph=True)


def test_a_model_may_write_into_its_inputs():
    """As Whisper masks its features, which the gradient of the first convolution needs."""
    sizes = {
        "encoder_layers": 2,
        "decoder_layers": LAYERS,
        "d_model": 16,
        "vocab_size": 40,
        "num_mel_bins": 8,
    }
    sizes |= {
        f"{part}_{what}": 2
        for part in ("encoder", "decoder")
        for what in ("attention_heads", "ffn_dim")
    }
    sizes |= {"max_source_positions": 20, "max_target_positions": 20, "decoder_start_token_id": 3}
    sizes |= {
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "apply_spec_augment": True,
        "dropout": 0.0,
    }
    model = build("WhisperForConditionalGeneration", sizes).train()
    batch = {"input_features": torch.randn(4, 8, 40), "labels": torch.randint(5, 40, (4, 6))}
    readout, losses = Readout.probe(model, batch), []
    with readout.attach(lambda layer, outputs, hidden: losses.append(outputs["loss"])):
        torch.manual_seed(0)
        own = model(**{name: value.clone() for name, value in batch.items()}).loss
    assert torch.equal(losses[-1], own) and not torch.equal(losses[0], own)
    sum(losses).backward()
    read = model.model.encoder.conv1.weight.grad.clone()
    assert read.isfinite().all() and read.any()


@pytest.mark.parametrize(
    "name", ["XLMForSequenceClassification", "FlaubertForSequenceClassification"]
)
def test_models_that_write_into_module_outputs_can_be_trained(name):
    model = build(
        name, XLM | {"dropout": 0.0, "attention_dropout": 0.0, "summary_first_dropout": 0.0}
    )
    batch = batch_for(model)
    sum(logits.square().sum() for logits in layer_logits(model.train(), batch)).backward()
    gradient = model.transformer.layer_norm_emb.weight.grad.clone()
    model.zero_grad()
    for model.transformer.n_layers in (1, 2, 3):
        output_logits(model(**batch)).square().sum().backward()
    torch.testing.assert_close(gradient, model.transformer.layer_norm_emb.weight.grad)


def test_a_model_may_put_others_into_a_modules_output():
    """As Qwen2-VL splits the features of its vision tower by image, in the place where the tower left them whole."""
    text = {name: size for name, size in DECODER.items() if name != "head_dim"}
    text["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [1, 1, 2],
    }
    vision = {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 32, "patch_size": 4}
    ids = {
        "image_token_id": 9,
        "video_token_id": 8,
        "vision_start_token_id": 7,
        "vision_end_token_id": 6,
    }
    model = build(
        "Qwen2VLForConditionalGeneration", {"text_config": text, "vision_config": vision, **ids}
    )
    batch = {"input_ids": torch.tensor([[5, 9, 20, 21], [5, 9, 22, 23]])}
    batch |= {
        "pixel_values": torch.randn(8, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 2, 2]] * 2),
    }
    batch["mm_token_type_ids"] = (batch["input_ids"] == 9).int()
    read, stack = layer_logits(model, batch), model.model.language_model
    for layer in (3, 2, 1):
        stack.layers = stack.layers[:layer]
        stack.config.num_hidden_layers = layer
        torch.testing.assert_close(read[layer - 1], model(**batch).logits)


def test_train_mode_draws_the_same_dropout_masks_as_the_model(bert):
    model = copy.deepcopy(bert).train()
    batch = batch_for(model)
    readout = Readout.probe(model, batch)
    torch.manual_seed(3)
    own, drawn = model(**batch).logits, torch.rand(LAYERS).tolist()

    torch.manual_seed(3)
    seen, draws = [], []

    def on_layer(layer, outputs, hidden):
        seen.append((outputs["logits"], hidden))
        draws.append(torch.rand(1).item())

    with readout.attach(on_layer):
        outputs = model(**batch)
    assert draws == drawn  # as if nothing had been replayed
    assert torch.equal(outputs.logits, own)

    # Layer l with the mask that the model draws after its last layer: dropout applied by hand to the pooled output.
    torch.manual_seed(3)
    pooled_sizes = []
    hook = model.dropout.register_forward_hook(
        lambda m, args, out: pooled_sizes.append(out / args[0])
    )
    model(**batch)
    hook.remove()
    mask = pooled_sizes[0].nan_to_num()  # [batch, width], 0 or 1 / (1 - p)
    for logits, hidden in seen:
        torch.testing.assert_close(logits, model.classifier(model.bert.pooler(hidden) * mask))


def test_running_statistics_of_the_tail_are_updated_once():
    model = TwoStage().train()
    model.head = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 3))
    expected, x = copy.deepcopy(model), torch.randn(6, 4)
    layer_logits(model, {"x": x})
    expected(x)
    assert torch.equal(model.head[0].running_mean, expected.head[0].running_mean)
    assert model.head[0].num_batches_tracked == 1
    model(x)
    assert model.head[0].num_batches_tracked == 2


def state_of(model):
    modules = list(model.modules())
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in modules]
    return [set(vars(m)) for m in modules], hooks, [m.training for m in modules]


def test_leaves_nothing_behind(bert):
    def draw(*_):  # as some models do in eval mode, too
        random.random(), np.random.rand(), torch.rand(1)  # noqa: NPY002

    model = copy.deepcopy(bert).train()
    model.classifier.register_forward_hook(draw)
    model.bert.embeddings.eval()
    batch = batch_for(model)
    before, config = state_of(model), copy.deepcopy(model.config)
    random_states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()  # noqa: NPY002
    readout = Readout.probe(model, batch)
    assert random.getstate() == random_states[0]
    assert np.array_equal(np.random.get_state()[1], random_states[1])  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), random_states[2])
    assert state_of(model) == before
    assert model.config.to_dict() == config.to_dict()

    with readout.attach(lambda *_: None):
        model(**batch)
    assert state_of(model) == before
    with pytest.raises(ZeroDivisionError), readout.attach(lambda *_: 1 / 0):
        model(**batch)
    assert state_of(model) == before
    assert not noise_is_disabled()


def test_recovers_from_a_forward_that_raises():
    model, x, seen = TwoStage(), torch.randn(2, 4), []
    before = state_of(model)
    with Readout.probe(model, {"x": x}).attach(lambda layer, *_: seen.append(layer)):
        with pytest.raises(RuntimeError, match="on purpose"):
            model(x, fail=True)
        model(x)
    assert seen == [1, 2, 3, 4]
    assert state_of(model) == before


@pytest.mark.parametrize("compiled", [False, True])
def test_replays_run_neither_layers_nor_their_hooks(compiled):
    model, x, ran, before_others = TwoStage(), torch.randn(2, 4), Counter(), []
    for block in model.blocks if compiled else ():
        block.compile(backend="eager")
    readout = Readout.probe(model, {"x": x})
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, name=name: ran.update([name]))
    model.calls.clear()
    with readout.attach(lambda *_: before_others.append(ran[""] == 0)):
        model(x)
    assert before_others == [True] * 4
    assert model.calls["forward"] == 4  # its own and 3 replays
    assert ran["head"] == ran["dropout"] == 4
    assert ran["embed"] == ran["blocks.0"] == ran["blocks.3"] == ran["blocks.0.0"] == ran[""] == 1


class DirectInTraining(TwoStage):
    """Calls `forward` in the place of its modules, in train mode alone."""

    def forward(self, x):
        def entered(module):
            return module.forward if self.training else module

        hidden = entered(self.embed)(x)
        for block in self.blocks:
            hidden = entered(block)(hidden)
        return {"logits": entered(self.head)(hidden)}


def test_a_model_may_call_the_forward_of_its_modules_in_one_mode_alone():
    model, x = DirectInTraining(), torch.randn(2, 4)
    is_wrapped = []
    model.blocks[0][0].register_forward_hook(
        lambda *_: is_wrapped.append("forward" in vars(model.blocks[0]))
    )
    expected, hidden = [], model.embed(x)
    for block in model.blocks:
        hidden = block(hidden)
        expected.append(model.head(hidden))

    readout = Readout.probe(model, {"x": x})
    for trains in (False, True, False, True):
        model.train(trains)
        for _ in range(2):
            is_wrapped.clear()
            logits = readout.layer_scores({"x": x}, output_logits)
            assert all(map(torch.equal, logits, expected)) and len(logits) == 4
        # The first forward has shown where this takes time for nothing.
        assert is_wrapped == [trains]


class BranchingInTraining(DirectInTraining):
    """Its tail reads a value in train mode, which it cannot for several layers at once."""

    def forward(self, x):
        outputs = super().forward(x)
        if self.training and outputs["logits"].sum() > 0:
            outputs["logits"] = -outputs["logits"]
        return outputs


def test_layers_stay_out_of_replays_in_a_mode_that_calls_their_forward():
    model, x = BranchingInTraining().eval(), torch.randn(2, 4)
    modes = []
    model.blocks[0][0].register_forward_hook(lambda *_: modes.append(model.training))
    readout = Readout.probe(model, {"x": x})
    readout.layer_scores({"x": x}, output_logits)
    readout.check_batching({"x": x})
    assert not readout.is_batched and modes and not any(modes)


class Checkpointing(TwoStage):
    """Calls `forward` in the place of its layers under activation checkpointing alone."""

    checkpoints = False

    def forward(self, x):
        hidden = self.embed(x)
        for block in self.blocks:
            if self.checkpoints:
                hidden = torch.utils.checkpoint.checkpoint(
                    block.forward, hidden, use_reentrant=False
                )
            else:
                hidden = block(hidden)
        return {"logits": self.head(hidden)}


def test_activation_checkpointing_may_begin_later():
    model, x = Checkpointing().train(), torch.randn(2, 4)
    readout = Readout.probe(model, {"x": x})
    expected = readout.layer_scores({"x": x}, output_logits)
    model.checkpoints = True
    again = Readout.probe(model, {"x": x}).layer_scores({"x": x}, output_logits)
    assert all(map(torch.equal, again, expected)) and len(again) == 4

    model.checkpoints = False
    readout = Readout.probe(model, {"x": x})
    readout.layer_scores({"x": x}, output_logits)
    model.checkpoints = True  # without a new probe, one forward is refused
    with pytest.raises(ValueError, match="ran 0 layers"):
        readout.layer_scores({"x": x}, output_logits)
    again = readout.layer_scores({"x": x}, output_logits)
    assert all(map(torch.equal, again, expected))


def test_record_holds_nothing_from_inside_layers(bert):
    alive = []
    handle = bert.bert.encoder.layer[0].intermediate.register_forward_hook(
        lambda module, args, output: alive.append(weakref.ref(output))
    )
    batch = batch_for(bert)
    readout = Readout.probe(bert, batch)
    alive.clear()
    held = []
    with (
        torch.no_grad(),
        readout.attach(lambda *_: held.append([ref() is not None for ref in alive])),
    ):
        bert(**batch)
    handle.remove()
    assert held == [[False]] * LAYERS


def test_noise_is_disabled_in_replays_alone():
    model, x, flags = TwoStage(), torch.randn(2, 4), []
    readout = Readout.probe(model, {"x": x})
    model.head.register_forward_pre_hook(lambda *_: flags.append(noise_is_disabled()))
    with readout.attach(lambda *_: None):
        model(x)
    assert flags == [False, True, True, True]


def test_asks_the_generators_of_python_and_numpy_once_in_each_mode(bert, monkeypatch):
    def draw(*_):
        random.random()

    readings = []
    read = random_state.python_states
    monkeypatch.setattr(random_state, "python_states", lambda: readings.append(None) or read())
    batch = batch_for(bert)
    drawing = copy.deepcopy(bert)
    drawing.classifier.register_forward_hook(draw)
    for model, per_call in ((copy.deepcopy(bert), 0), (drawing, LAYERS - 1)):
        readout = Readout.probe(model, batch)
        for trains in (False, True):
            model.train(trains)
            for _ in range(2):
                readings.clear()
                state = random.getstate()
                with readout.attach(lambda *_: None):
                    model(**batch)
            assert len(readings) == per_call
            random.setstate(state)
            if per_call:
                draw()
            draws_of_one_forward = random.getstate()
            random.setstate(state)
            with readout.attach(lambda *_: None):
                model(**batch)
            assert random.getstate() == draws_of_one_forward
