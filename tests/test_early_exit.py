import json
import math

import numpy as np
import pytest
import torch
import transformers
from architectures import LAYERS, MODELS, REFUSED, TwoStage, batch_for, build
from tiny import bert, classification_data, llama, word_tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    default_data_collator,
)

from hf_descent import cli, layer_logits
from hf_descent.early_exit import (
    ConfidenceExit,
    ConfidenceReport,
    ExitProfile,
    SpeculationProfile,
    check_self_speculation,
    exit_profile,
    speculation_profile,
    truncate,
)
from hf_descent.early_exit.truncation import example_inputs
from hf_descent.readout import output_logits


# ---- truncation ----


@pytest.mark.parametrize("name", MODELS)
def test_a_truncated_model_has_the_logits_of_its_layer_before_and_after_it_is_saved(name, tmp_path):
    model = build(name, MODELS[name][0])
    inputs = batch_for(model)
    with torch.no_grad():
        truth = layer_logits(model, inputs)
        for layer in range(1, LAYERS + 1):
            short = truncate(model, layer, inputs)
            assert torch.equal(output_logits(short(**inputs)), truth[layer - 1])
            short.save_pretrained(tmp_path / str(layer))
            loaded = type(model).from_pretrained(tmp_path / str(layer))
            # Products of weights that lie elsewhere in memory may round differently.
            torch.testing.assert_close(output_logits(loaded(**inputs)), truth[layer - 1], rtol=1e-5, atol=1e-5)
        assert getattr(model.config, MODELS[name][1]) == LAYERS


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_is_made_up_for_every_kind_of_model(name):
    model = build(name, MODELS[name][0])
    short = truncate(model, 2)
    inputs = batch_for(model)
    with torch.no_grad():
        assert torch.equal(output_logits(short(**inputs)), layer_logits(model, inputs)[1])


def test_a_truncated_model_stands_alone_and_counts_its_layers(tmp_path):
    model = bert(num_layers=4).train()
    state = torch.get_rng_state()
    short = truncate(model, 2)
    assert short.training and model.training and torch.equal(torch.get_rng_state(), state)
    assert sum(p.numel() for p in short.parameters()) < sum(p.numel() for p in model.parameters())
    with torch.no_grad():
        model.bert.encoder.layer[0].output.dense.weight.zero_()
    assert short.bert.encoder.layer[0].output.dense.weight.any()
    short.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).num_hidden_layers == 2
    loaded, report = AutoModelForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert len(loaded.bert.encoder.layer) == 2


def test_lists_with_an_entry_per_layer_are_cut_and_tied_weights_stay_tied(tmp_path):
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    config = transformers.Qwen2Config(
        **MODELS["Qwen2ForCausalLM"][0], layer_types=types, use_sliding_window=True, tie_word_embeddings=True
    )
    model = transformers.Qwen2ForCausalLM(config).to(torch.bfloat16)
    short = truncate(model, 2)
    assert short.config.layer_types == types[:2] and config.layer_types == types
    assert short.lm_head.weight is short.model.embed_tokens.weight and short.dtype == torch.bfloat16
    short.generation_config.max_new_tokens = 3
    short.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["layer_types"] == types[:2]
    assert short.generate(torch.tensor([[5, 6]]), do_sample=False).shape[1] <= 5


@pytest.mark.parametrize("name", REFUSED)
def test_models_without_a_shared_readout_are_refused(name):
    model = build(name, REFUSED[name][0])
    with pytest.raises(ValueError, match=REFUSED[name][1]):
        truncate(model, 1, batch_for(model))


MINICPM = MODELS["LlamaForCausalLM"][0] | {"num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8}
MINICPM |= {"head_dim": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}


def test_a_model_whose_scale_depends_on_its_depth_is_refused():
    model = build("MiniCPM3ForCausalLM", MINICPM)
    with pytest.raises(ValueError, match="not those of layer 1"):
        truncate(model, 1)
    assert truncate(model, LAYERS).config.num_hidden_layers == LAYERS


def test_bad_arguments_to_truncate_are_named():
    with pytest.raises(ValueError, match=r"`num_layers` is 4; BertForSequenceClassification has 1..3"):
        truncate(bert(), 4)
    with pytest.raises(TypeError, match="`model` is a TwoStage"):
        truncate(TwoStage(), 1)
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(llama(), peft.LoraConfig(task_type="CAUSAL_LM"))
    with pytest.raises(TypeError, match="merge_and_unload"):
        truncate(adapted, 1)
    model = bert()
    model.main_input_name = "spectrogram"
    with pytest.raises(ValueError, match="give `inputs`"):
        example_inputs(model)


# ---- exit profile ----


def toy_rows(count, seed=0):
    return classification_data(count, length=8, seed=seed, pad=False)


def spread(model):
    """Weights of order one, so that layers differ and samples are of different difficulty."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=4.0 * parameter[0].numel() ** -0.5)
    return model.eval()


def test_the_exit_profile_has_the_metric_of_every_truncated_model():
    model, rows = spread(bert(num_layers=3)), toy_rows(24)
    profile = exit_profile(model, rows, batch_size=8, timing_batches=2, repeats=2)
    batch = default_data_collator(rows)
    for layer in range(1, 4):
        with torch.no_grad():
            outputs = truncate(model, layer, batch)(**batch)
        hits = (outputs.logits.argmax(-1) == batch["labels"]).float().mean()
        assert profile.values[layer - 1] == pytest.approx(hits.item())
        assert profile.losses[layer - 1] == pytest.approx(outputs.loss.item(), rel=1e-5)
    assert (profile.seconds > 0).all() and profile.speedups[-1] == 1.0 and profile.batch_size == 8


def test_a_shorter_model_is_faster():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=128, num_hidden_layers=8, num_attention_heads=4, intermediate_size=256, num_labels=3
    )
    profile = exit_profile(
        transformers.BertForSequenceClassification(config), toy_rows(32), batch_size=32, timing_batches=1
    )
    assert profile.speedups[0] > profile.speedups[3] > 1.2


def test_the_cheapest_exit_keeps_the_share_of_the_metric_asked_for(tmp_path):
    profile = ExitProfile("accuracy", [0.5, 0.81, 0.79, 0.9], [1.0] * 4, [1.0, 2.0, 3.0, 4.0], 8)
    assert [profile.cheapest(share) for share in (0.99, 0.9, 0.5)] == [4, 2, 1]
    assert ExitProfile("rmse", [30.0, 20.1, 20.0], [1.0] * 3, [1.0] * 3, 8).cheapest(0.99) == 2
    assert profile.to_dict()["exit_speedup_2"] == 2.0 and profile.to_dict()["exit_layer_99"] == 4.0
    profile.to_json(str(tmp_path / "exit_profile.json"))
    assert str(ExitProfile.from_json(str(tmp_path / "exit_profile.json"))) == str(profile)
    with pytest.raises(ValueError, match="`repeats` is 0"):
        exit_profile(bert(), toy_rows(4), repeats=0)


# ---- confidence exit ----


def expected_exits(uncertainty, threshold):
    """First layer that is sure, in plain Python; `[layers, batch]` -> `[batch]`."""
    layers = []
    for sample in uncertainty.T.tolist():
        sure = [layer for layer, value in enumerate(sample[:-1], start=1) if value <= threshold]
        layers.append(sure[0] if sure else len(sample))
    return torch.tensor(layers)


CLASSIFIERS = [name for name in MODELS if name.endswith(("ForSequenceClassification", "ForImageClassification"))]


@pytest.mark.parametrize("measure", ["entropy", "margin"])
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_each_sample_gets_the_logits_of_the_first_layer_that_is_sure(name, measure):
    model = build(name, MODELS[name][0])
    batch = {key: torch.cat([value, value.flip(0), value[:1]]) for key, value in batch_for(model).items()}
    if "input_ids" in batch:
        batch["input_ids"][2:, 0] = torch.tensor([11, 12, 13])
    with torch.no_grad():
        layers = torch.stack(layer_logits(model, batch))  # [layers, batch, classes]
    probabilities = layers.double().softmax(-1)
    top = probabilities.sort(-1).values
    if measure == "entropy":
        uncertainty = -(probabilities * probabilities.log()).sum(-1) / math.log(layers.shape[-1])
    else:
        uncertainty = 1 - top[..., -1] + top[..., -2]  # [layers, batch]
    values = uncertainty.flatten().sort().values
    gaps = values.diff() > 1e-5  # equal ones are told apart by rounding
    thresholds = ((values[1:] + values[:-1]) / 2)[gaps].tolist()[::2]
    for threshold in (0.0, *thresholds, 1.0):
        output = ConfidenceExit(model, threshold, measure)(**batch)
        exits = expected_exits(uncertainty, threshold)
        assert output.exit_layers.tolist() == exits.tolist()
        torch.testing.assert_close(output.logits, layers[exits - 1, torch.arange(len(exits))], rtol=1e-4, atol=1e-5)


def test_samples_that_are_sure_leave_the_batch_for_good():
    model, batch = spread(bert(num_layers=4)), default_data_collator(toy_rows(16))
    sizes = []
    for layer in model.bert.encoder.layer:
        layer.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    fast = ConfidenceExit(model, threshold=0.5)
    fast(**batch)  # finds the batch dimensions
    sizes.clear()
    exits = fast(**batch).exit_layers
    assert len(set(exits.tolist())) > 2
    assert sizes == [n for layer in range(1, 5) if (n := int((exits >= layer).sum()))]
    fast.threshold = 1.0
    sizes.clear()
    assert fast(**batch).exit_layers.tolist() == [1] * 16 and sizes == [16]


def test_only_the_exits_allowed_are_used_and_the_model_is_left_as_it_was():
    model, batch = spread(bert(num_layers=4)).train(), default_data_collator(toy_rows(16))
    fast = ConfidenceExit(model, threshold=1.0, layers=[3])
    assert fast(**batch).exit_layers.tolist() == [3] * 16
    assert model.training and model(**batch).logits.requires_grad
    assert not any("_call_impl" in vars(module) or "forward" in vars(module) for module in model.modules())


def test_padding_that_a_later_batch_has_for_the_first_time_is_shrunk_with_it():
    model = spread(bert(num_layers=4))
    plain, padded = default_data_collator(toy_rows(16)), default_data_collator(classification_data(16, seed=5))
    fast = ConfidenceExit(model, threshold=0.5)
    for batch in (plain, padded, plain):
        with torch.no_grad():
            layers = torch.stack(layer_logits(model, batch))
        output = fast(**batch)
        assert len(set(output.exit_layers.tolist())) > 1
        expected = layers[output.exit_layers - 1, torch.arange(16)]
        torch.testing.assert_close(output.logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("max_loss", [0.0, 0.05, 0.2, 1.0])
def test_calibration_finds_the_cheapest_threshold_within_the_loss_allowed(max_loss):
    model, rows = spread(bert(num_layers=4)), toy_rows(60)
    fast = ConfidenceExit(model).calibrate(rows, max_loss, batch_size=16)
    batch = default_data_collator(rows)
    with torch.no_grad():
        layers = torch.stack(layer_logits(model, batch))
    labels, samples = batch["labels"], torch.arange(60)
    entropy = torch.distributions.Categorical(logits=layers).entropy() / math.log(3)
    full = (layers[-1].argmax(-1) == labels).float().mean()
    allowed = []
    for threshold in entropy[:-1].flatten().tolist():
        exits = expected_exits(entropy, threshold)
        if (layers[exits - 1, samples].argmax(-1) == labels).float().mean() >= full - max_loss - 1e-6:
            allowed.append(exits.double().mean().item())
    report = fast.evaluate(rows, batch_size=16, repeats=1)
    assert report.accuracy >= full - max_loss - 1e-6 and report.full_accuracy == pytest.approx(full.item())
    assert report.mean_layers == pytest.approx(min(allowed, default=4.0), abs=0.02)
    assert report.exit_shares.sum() == pytest.approx(1.0) and report.speedup > 0


def test_leaving_early_is_faster_by_the_clock():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=128, num_hidden_layers=8, num_attention_heads=4, intermediate_size=512, num_labels=3
    )
    model = transformers.BertForSequenceClassification(config)
    rows = classification_data(64, length=32, pad=False)
    report = ConfidenceExit(model, threshold=1.0).evaluate(rows, batch_size=64)
    assert report.mean_layers == 1.0 and report.speedup > 2.0


def test_layers_that_mix_samples_are_refused():
    class Mixing(torch.nn.Module):
        def forward(self, hidden, *args, **kwargs):
            return hidden + hidden.mean(0, keepdim=True)

    model = spread(bert(num_layers=3))
    model.bert.encoder.layer[2] = Mixing()
    batch = default_data_collator(toy_rows(16))
    fast = ConfidenceExit(model, threshold=0.5)
    assert 1 < fast(**batch).exit_layers.double().mean() < 3
    with pytest.raises(ValueError, match="its layers mix samples"):
        fast.check(batch)


def test_bad_arguments_to_confidence_exit_are_named():
    with pytest.raises(ValueError, match="`measure` is 'energy'"):
        ConfidenceExit(bert(), measure="energy")
    with pytest.raises(ValueError, match="`threshold` is 2"):
        ConfidenceExit(bert(), threshold=2)
    batch = default_data_collator(toy_rows(4))
    with pytest.raises(ValueError, match="`threshold` is not set"):
        ConfidenceExit(bert())(**batch)
    with pytest.raises(ValueError, match="`max_loss` is -1"):
        ConfidenceExit(bert()).calibrate(toy_rows(4), -1)
    with pytest.raises(ValueError, match=r"needs \[batch, classes\]"):
        ConfidenceExit(llama(), threshold=0.5)(input_ids=batch["input_ids"])
    with pytest.raises(ValueError, match=r"needs \[batch, classes\]"):
        ConfidenceExit(bert(num_labels=1), threshold=0.5)(input_ids=batch["input_ids"])
    rows = [{key: value for key, value in row.items() if key != "labels"} for row in toy_rows(4)]
    with pytest.raises(ValueError, match="no `labels`"):
        ConfidenceExit(bert()).calibrate(rows)


# ---- generation ----


def test_self_speculation_gives_the_greedy_text_and_the_acceptance_of_each_exit():
    model = spread(llama(num_layers=3))
    model.generation_config.eos_token_id = None
    prompts = [torch.tensor([[3, 4, 5]]), torch.tensor([[7, 8, 9, 10]])]
    profile = speculation_profile(model, prompts, max_new_tokens=12, max_timed=1, repeats=1)
    assert profile.equal[np.isfinite(profile.equal)].tolist() == [1.0]
    assert np.isfinite(profile.tokens_per_second).sum() == 1
    for layer in (1, 2):
        short, hits = truncate(model, layer, {"input_ids": prompts[0]}), 0
        for prompt in prompts:
            text = model.generate(prompt, do_sample=False, max_new_tokens=12, pad_token_id=0)
            for end in range(prompt.shape[1], text.shape[1]):
                with torch.no_grad():
                    hits += int(short(text[:, :end]).logits[0, -1].argmax() == text[0, end])
            drafted = model.generate(
                prompt, do_sample=False, max_new_tokens=12, pad_token_id=0, assistant_early_exit=layer
            )
            assert torch.equal(drafted, text)
        assert profile.acceptance[layer - 1] == pytest.approx(hits / 24)
    assert model.config.num_hidden_layers == 3


def test_the_best_exit_is_the_fastest_or_none():
    nan = float("nan")
    profile = SpeculationProfile([0.1, 0.9, 0.9], [nan, 30.0, 25.0], 20.0, [nan, 40.0, 30.0], [nan, 1.0, 1.0])
    assert profile.best == 2 and profile.to_dict()["speculation_speedup_3"] == 1.25
    assert "speculation_speedup_1" not in profile.to_dict()
    slow = SpeculationProfile([0.1, 0.2], [nan, 10.0], 20.0, [nan, 30.0], [nan, 1.0])
    assert slow.best is None and "assistant_early_exit=None" in str(slow)


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "BertForMaskedLM", "T5ForConditionalGeneration"])
def test_models_that_cannot_draft_with_their_layers_are_refused(name):
    with pytest.raises(ValueError, match="cannot draft with its"):
        check_self_speculation(build(name, MODELS[name][0]), torch.tensor([[5, 6, 7]]))


def test_the_depth_is_put_back_where_drafting_is_refused():
    model = build("GPT2LMHeadModel", MODELS["GPT2LMHeadModel"][0])
    with pytest.raises(ValueError, match="cannot draft"):
        check_self_speculation(model, torch.tensor([[5, 6, 7]]))
    assert model.config.num_hidden_layers == LAYERS
    with pytest.raises(ValueError, match="0 `prompts`"):
        speculation_profile(llama(), [])


# ---- the command ----


def written_rows(path, count=40, labels=True):
    rows = [
        {"text": " ".join(f"w{(7 * i + j) % 38}" for j in range(12))} | ({"label": i % 3} if labels else {})
        for i in range(count)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_the_exit_command_reports_a_classifier_and_saves_the_cut_model(tmp_path, capsys):
    spread(bert(num_layers=3)).save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    data = written_rows(tmp_path / "rows.jsonl")
    cli.main(
        [
            "exit",
            str(tmp_path / "model"),
            "--train_file",
            data,
            "--validation_file",
            data,
            "--test_file",
            data,
            "--save_layer",
            "2",
            "--repeats",
            "1",
            "--max_seq_length",
            "12",
            "--max_loss",
            "0.1",
        ]
    )
    printed = capsys.readouterr().out
    profile = ExitProfile.from_json(str(tmp_path / "model" / "exit_profile.json"))
    report = ConfidenceReport.from_json(str(tmp_path / "model" / "confidence_exit.json"))
    assert str(profile) in printed and str(report) in printed and len(profile.values) == 3
    assert report.full_accuracy == pytest.approx(profile.values[-1], abs=1e-6)
    assert report.accuracy >= report.full_accuracy - 0.1 - 1e-6
    assert (tmp_path / "model" / "exits.png").stat().st_size > 1000
    assert (
        len(AutoModelForSequenceClassification.from_pretrained(tmp_path / "model" / "layer-2").bert.encoder.layer) == 2
    )


def test_the_exit_command_reports_a_language_model(tmp_path, capsys):
    spread(llama(num_layers=3)).save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    data = written_rows(tmp_path / "texts.jsonl", 6, labels=False)
    cli.main(
        [
            "exit",
            str(tmp_path / "model"),
            "--text_file",
            data,
            "--prompts",
            "2",
            "--prompt_length",
            "4",
            "--max_new_tokens",
            "6",
            "--repeats",
            "1",
            "--output_dir",
            str(tmp_path / "out"),
        ]
    )
    assert "best: assistant_early_exit=" in capsys.readouterr().out
    profile = ExitProfile.from_json(str(tmp_path / "out" / "exit_profile.json"))
    speculation = SpeculationProfile.from_json(str(tmp_path / "out" / "speculation_profile.json"))
    assert len(speculation.acceptance) == 2 and len(profile.values) == 3
    ids = torch.tensor([[2 + (7 * i + j) % 38 for j in range(12)] for i in range(6)])
    loss = AutoModelForCausalLM.from_pretrained(tmp_path / "model")(ids, labels=ids).loss
    assert profile.losses[-1] == pytest.approx(loss.item(), rel=1e-4)
    with pytest.raises(ValueError, match="`prompt_length` = 40"):
        cli.main(["exit", str(tmp_path / "model"), "--text_file", data, "--prompt_length", "40"])
    with pytest.raises(ValueError, match="`text_file` is None"):
        cli.main(["exit", str(tmp_path / "model")])
