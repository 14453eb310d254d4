import contextlib
import copy
import itertools
import warnings

import pytest
import torch
import transformers
from architectures import MODELS
from datasets import Dataset
from packaging.version import Version
from peft import PromptTuningConfig
from PIL import Image
from programs import python
from tiny.models import spread
from tiny.sft import LORA, SETTINGS, TOKENIZER, gpt2, history, llama, make, mixtral, pairs, plain
from tiny.tokenizers import tokenizer
from tiny.training import fitted
from torch import nn
from transformers import DataCollatorWithFlattening, TrainingArguments
from trl import SFTConfig, SFTTrainer

from hf_descent import DescentConfig, DescentTrainer, SFTDescentConfig, SFTDescentTrainer
from hf_descent.configs import CONSTRAINT_METRICS
from hf_descent.training.evaluation import CountedRows


def trained(cls, folder, **given):
    return fitted(make(cls, folder, **given))


def stock_copy(ours, folder, **given):
    """The stock trainer on the weights of another."""
    stock = make(SFTTrainer, folder, per_device_eval_batch_size=16, **given)
    stock.model.load_state_dict(ours.model.state_dict())
    return stock


def assert_equal_weights(one, other, rtol=0.0, atol=0.0):
    torch.testing.assert_close(
        one.model.state_dict(), other.model.state_dict(), rtol=rtol, atol=atol
    )


def assert_close_weights(one, other):
    assert_equal_weights(one, other, rtol=1e-3, atol=1e-4)


# Each is near to another one, which the default tests have.
NEAR = {"text", "chat", "whole sequence", "packed across", "lora dropout", "lora checkpointing"}


@pytest.mark.parametrize(
    "setting",
    [pytest.param(name, marks=pytest.mark.slow if name in NEAR else ()) for name in SETTINGS],
)
def test_erm_is_the_stock_trainer_bit_for_bit_and_warm_up_takes_its_steps(tmp_path, setting):
    stock, erm, ours = (
        trained(cls, tmp_path, **SETTINGS[setting], **given)
        for cls, given in (
            (SFTTrainer, {}), (SFTDescentTrainer, {"objective": "erm", "descent_alpha": "line"}),
            (SFTDescentTrainer, {"dual_warmup_steps": 4}),
        )
    )  # fmt: skip
    tolerance = {"rel": 1e-2, "abs": 5e-2} if setting == "bf16" else {"rel": 2e-4, "abs": 1e-5}

    for log, expected in zip(history(ours)[:-1], history(stock)[:-1]):
        if setting == "experts":
            expected.pop("loss")  # with the router's, which is no layer's
        assert {name: log[name] for name in expected} == pytest.approx(expected, **tolerance)
        assert all(f"layer_loss_{layer}" in log for layer in (1, 2, 3))

    if setting != "bf16":
        assert_close_weights(ours, stock)
    stock.evaluate()
    erm.evaluate()
    layers = [f"layer_loss_{layer}" for layer in (1, 2, 3)]
    beside = {f"eval_{name}" for name in (*layers, "largest_rise", *CONSTRAINT_METRICS)}
    own = [
        {name: value for name, value in log.items() if name not in beside} for log in history(erm)
    ]

    assert own == history(stock) and beside <= {name for log in history(erm) for name in log}

    assert_equal_weights(erm, stock)


CONSTRAINED = {
    "descent_alpha": 0.2, "initial_loss_bound": 5.0, "dual_warmup_steps": 0, "dual_learning_rate": 0.2,
    "per_device_eval_batch_size": 16,
}  # fmt: skip


@pytest.mark.parametrize("completions", [True, False])
@pytest.mark.parametrize("setting", ["packed", "lora checkpointing", "experts"])
def test_evaluation_of_a_constrained_model_has_the_stock_metrics(tmp_path, setting, completions):
    given = {**SETTINGS[setting], "completion_only_loss": completions}
    ours = trained(SFTDescentTrainer, tmp_path, **given, **CONSTRAINED)

    assert ours.multipliers.values.gt(0).all()

    # Sure of itself, or what it predicts for one token could not be told from what it predicts for the next.
    ours.model.get_output_embeddings().weight.data *= 100
    metrics = ours.evaluate()
    expected = stock_copy(ours, tmp_path, **given).evaluate()

    for name in (
        "eval_mean_token_accuracy",
        "eval_entropy",
        *(["eval_loss"] if setting != "experts" else []),
    ):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-4), name

    assert metrics["eval_layer_loss_3"] == metrics["eval_loss"]

    if setting != "packed":  # whose rows, strung together, are one sample
        found = ours.evaluate_layers()
        loss = metrics["eval_loss"]
        accuracy = metrics["eval_mean_token_accuracy"]
        assert [found.losses[-1], found.values[-1]] == pytest.approx([loss, accuracy], rel=1e-4)


def squares(outputs, labels, num_items_in_batch=None):
    count = labels[:, 1:].ne(-100).sum() if num_items_in_batch is None else num_items_in_batch
    losses = nn.functional.cross_entropy(
        outputs["logits"][:, :-1].transpose(1, 2), labels[:, 1:], reduction="none"
    )
    return losses.square().sum() / count


VARIANTS = {
    "plain": {}, "packed": {"packing": True, "max_length": 48}, "noise": {"noise_gamma": 1.0},
    "accumulation": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    "own loss": {"keywords": {"layer_loss_fn": squares}}, "label smoothing": {"label_smoothing_factor": 0.1},
    "deep supervision": {"objective": "deep_supervision"}, "layerskip": {"objective": "layerskip"},
}  # fmt: skip


@pytest.mark.filterwarnings(
    "ignore:`(compute_loss_func|label_smoothing_factor)` is deprecated:FutureWarning"
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_descent_is_that_of_the_plain_trainer_on_the_same_batches(tmp_path, readouts, variant):
    given = dict(CONSTRAINED, **VARIANTS[variant])
    ours = trained(SFTDescentTrainer, tmp_path, **given)
    keywords = given.pop("keywords", {})
    kept = {"input_ids", "labels", "seq_lengths"}
    rows = ours.train_dataset.remove_columns({*ours.train_dataset.column_names} - kept)
    args = {name: value for name, value in given.items() if name not in ("packing", "max_length")}
    shared = (
        "report_to",
        "use_cpu",
        "disable_tqdm",
        "max_steps",
        "learning_rate",
        "per_device_train_batch_size",
    )
    args |= dict(
        {name: getattr(ours.args, name) for name in shared}, save_strategy="no", logging_steps=1
    )
    model = llama()
    torch.manual_seed(ours.args.seed)
    args = DescentConfig(str(tmp_path), remove_unused_columns=False, **args)
    plain = fitted(
        DescentTrainer(
            model, args, train_dataset=rows, data_collator=ours.data_collator, **keywords
        )
    )
    torch.testing.assert_close(
        ours.multipliers.values, plain.multipliers.values, rtol=1e-4, atol=1e-6
    )

    assert ours.multipliers.values.gt(0).any() or "objective" in given

    assert_close_weights(ours, plain)
    if variant not in ("own loss", "label smoothing"):
        return

    assert set(readouts()) == {"replay" if variant == "own loss" else "tiles"}

    metrics = ours.evaluate()
    expected = stock_copy(ours, tmp_path).evaluate()

    for name in ("eval_mean_token_accuracy", "eval_entropy"):  # whatever the loss
        assert metrics[name] == pytest.approx(expected[name], rel=1e-4), name


def test_one_large_batch_is_eight_small_ones(tmp_path):
    runs = []

    for size in (8, 1):
        sizes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 8 // size}
        runs.append(trained(SFTDescentTrainer, tmp_path, **CONSTRAINED, **sizes))

    torch.testing.assert_close(
        runs[0].multipliers.values, runs[1].multipliers.values, rtol=1e-4, atol=1e-6
    )
    keys = (
        "loss",
        "grad_norm",
        "lagrangian",
        "num_tokens",
        *(f"layer_loss_{layer}" for layer in (1, 2, 3)),
    )

    for large, small in zip(*(history(trainer)[:-1] for trainer in runs)):
        assert [small[key] for key in keys] == pytest.approx([large[key] for key in keys], rel=1e-4)


@pytest.mark.parametrize("setting", ["pairs", "lora dropout"])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, setting):
    given = dict(CONSTRAINED, **SETTINGS[setting], noise_gamma=1.0, readout_token_fraction=0.5)
    straight = trained(
        SFTDescentTrainer, tmp_path / "straight", **given, save_strategy="steps", save_steps=2
    )
    resumed = make(SFTDescentTrainer, tmp_path / "resumed", **given)
    resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-2"))
    assert torch.equal(resumed.multipliers.values, straight.multipliers.values)
    assert_equal_weights(resumed, straight)


@pytest.mark.parametrize("setting", ["lora", "packed", "padding free", "pairs"])
def test_checkpointing_draws_the_same_noise(tmp_path, setting):
    given = dict(CONSTRAINED, **SETTINGS[setting])
    losses = {}
    for gamma, checkpointing in ((0.0, False), (1.0, False), (1.0, True)):
        given.update(noise_gamma=gamma, activation_checkpointing=checkpointing)
        trainer = trained(SFTDescentTrainer, tmp_path, **given)
        losses[gamma, checkpointing] = [log["loss"] for log in history(trainer)[:-1]]
    assert losses[1.0, True] == pytest.approx(losses[1.0, False], rel=1e-5)
    assert losses[1.0, False] != pytest.approx(losses[0.0, False], rel=1e-3)


def test_erm_takes_noise(tmp_path):
    clean = trained(SFTTrainer, tmp_path)
    noisy = trained(SFTDescentTrainer, tmp_path, objective="erm", noise_gamma=1.0)
    assert history(noisy)[0]["loss"] != history(clean)[0]["loss"]
    assert history(noisy)[0]["loss"] == pytest.approx(history(clean)[0]["loss"], rel=0.1)
    assert noisy.model.config.noise_sigma > 0


@pytest.mark.parametrize("setting", ["pairs", "packed", "lora"])
def test_robustness_without_noise_is_the_evaluation(tmp_path, setting):
    trainer = trained(SFTDescentTrainer, tmp_path, **CONSTRAINED, **SETTINGS[setting])
    metrics = trainer.evaluate()
    raw = pairs(9, 40)
    for dataset in (None, raw, raw.to_iterable_dataset()):
        curve = trainer.evaluate_robustness(dataset, gammas=[0.0, 4.0], draws=1)
        assert curve.losses[0, 0] == pytest.approx(metrics["eval_loss"], rel=1e-5)
        assert curve.values[0, 0] == pytest.approx(metrics["eval_mean_token_accuracy"], rel=1e-5)
        assert curve.losses[1, 0] != pytest.approx(metrics["eval_loss"], rel=1e-3)


def test_rows_that_fill_the_last_batch_count_in_no_metric(tmp_path, monkeypatch):
    ours = make(SFTDescentTrainer, tmp_path, **CONSTRAINED)
    ours.model.lm_head.weight.data.mul_(100)  # predictions that differ from row to row
    data = ours.eval_dataset.select(range(4))
    expected = ours.evaluate(data.select(range(3)))
    # As one of several processes.
    monkeypatch.setattr(
        "hf_descent.training.evaluation.counted_rows", lambda trainer, inputs: CountedRows(3)
    )
    found = ours.evaluate(data)
    for name in ("eval_loss", "eval_layer_loss_1", "eval_mean_token_accuracy", "eval_entropy"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5), name


def test_filled_sets_keep_their_own_rows_with_persistent_workers(tmp_path, monkeypatch):
    workers = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    ours = make(SFTDescentTrainer, tmp_path, **CONSTRAINED, **workers)
    ours.eval_dataset = {"a": ours.eval_dataset, "b": ours.eval_dataset.select(range(3))}
    # As on several processes.
    monkeypatch.setattr(ours, "_filled", lambda rows: rows.select(range(len(rows))))
    for name, rows in ours.eval_dataset.items():
        assert len(ours.get_eval_dataloader(name).dataset) == len(rows)


def test_compute_metrics_gets_the_stock_logits(tmp_path):
    def keep(prediction):
        seen.append(prediction.predictions)
        return {"size": float(prediction.label_ids.size)}

    seen = []
    ours = trained(SFTDescentTrainer, tmp_path, keywords={"compute_metrics": keep}, **CONSTRAINED)
    stock = stock_copy(ours, tmp_path, keywords={"compute_metrics": keep})
    metrics = ours.evaluate()
    expected = stock.evaluate()
    torch.testing.assert_close(*map(torch.from_numpy, seen), rtol=1e-4, atol=1e-5)
    assert metrics["eval_size"] == expected["eval_size"]


def test_what_offloads_activations_sees_no_backward_pass_in_the_forward(tmp_path):
    events = []
    trainer = make(SFTDescentTrainer, tmp_path, **CONSTRAINED)
    trainer.maybe_activation_offload_context = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (events.append("pack"), tensor)[1],
        lambda tensor: (events.append("unpack"), tensor)[1],
    )
    trainer.train()
    assert [kind for kind, _ in itertools.groupby(events)] == ["pack", "unpack"] * 4


# ---- what it says and refuses ----


def test_plain_arguments_are_taken(tmp_path):
    for args in (
        SFTConfig(str(tmp_path), max_length=33, use_cpu=True),
        TrainingArguments(str(tmp_path), use_cpu=True),
    ):
        trainer = SFTDescentTrainer(
            llama(), args, train_dataset=pairs(8), processing_class=copy.deepcopy(TOKENIZER)
        )
        assert isinstance(trainer.args, SFTDescentConfig)
        assert trainer.args.objective == "descent"
        assert trainer.args.learning_rate == args.learning_rate
    assert trainer.args.max_length == SFTConfig(str(tmp_path), use_cpu=True).max_length


@pytest.mark.parametrize(
    ("given", "rate"),
    [
        ({}, 0.0002),
        ({"dual_learning_rate": 0.02}, 0.02),
        ({"loss_targets": {1: 1.0}}, 0.04),
        ({"loss_targets": {1: 1.0}, "descent_alpha": "line"}, 0.0002),
    ],
)
def test_language_models_have_a_dual_rate_of_their_own(tmp_path, given, rate):
    of_others = DescentConfig(str(tmp_path), use_cpu=True, **given)
    for args in (
        SFTDescentConfig(str(tmp_path), use_cpu=True, **given),
        SFTDescentConfig.from_training_arguments(of_others),
    ):
        assert args.dual_settings.dual_learning_rate == rate


@pytest.mark.parametrize("objective", ["descent", "erm"])
def test_a_resumed_run_goes_on_counting_tokens(tmp_path, objective):
    given = {"objective": objective, "save_strategy": "steps", "save_steps": 1, "logging_steps": 2}
    straight, resumed = (make(SFTDescentTrainer, tmp_path, **given) for _ in range(2))
    straight.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))  # between two logs
    logs = [
        {log["step"]: log["num_tokens"] for log in t.state.log_history if "loss" in log}
        for t in (straight, resumed)
    ]
    assert logs[0] == logs[1]


def test_preview(tmp_path):
    assert make(SFTDescentTrainer, tmp_path).preview() == (
        "First training example: 12 tokens, 5 with a label\n[no label] 'Say c0:'\n[label] ' c0!</s>'"
    )


def test_preview_of_an_image_and_its_text(tmp_path):
    """Of which TRL makes tokens in the collator alone."""
    tok = tokenizer(chat=False)
    tok.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tok.image_token = "<image>"
    pixels = {"height": 8, "width": 8}
    images = transformers.CLIPImageProcessorPil(size=pixels, crop_size=pixels)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**sizes, image_size=8, patch_size=4),
        text_config=transformers.LlamaConfig(**sizes, vocab_size=len(tok)),
        image_token_index=tok.convert_tokens_to_ids("<image>"), vision_feature_layer=-1,
    )  # fmt: skip
    template = "{% for m in messages %}{% for c in m.content %}{{ c.text or '<image>' }}{% endfor %}{% endfor %}"
    given = {
        "patch_size": 4,
        "num_additional_image_tokens": 1,
        "vision_feature_select_strategy": "default",
    }
    processor = transformers.LlavaProcessor(images, tok, **given, chat_template=template)
    ask = [{"role": "user", "content": "what? "}]
    answer = [{"role": "assistant", "content": "a cat"}]
    row = {"images": [Image.new("RGB", (8, 8))], "prompt": ask, "completion": answer}
    args = SFTDescentConfig(
        str(tmp_path), use_cpu=True, bf16=False, report_to="none", max_length=None
    )
    model = transformers.LlavaForConditionalGeneration(config)
    rows = Dataset.from_list([row] * 4)

    assert SFTDescentTrainer(
        model, args, train_dataset=rows, processing_class=processor
    ).preview() == (
        "First training example: 15 tokens, 5 with a label\n[no label] '<image><image><image><image>what? '\n"
        "[label] 'a cat'"
    )


def test_a_run_warns_of_nothing_that_the_stock_trainer_does_not(tmp_path, caplog):
    said = []
    for cls, given in ((SFTTrainer, {}), (SFTDescentTrainer, {"objective": "deep_supervision"})):
        caplog.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trained(
                cls, tmp_path, peft_config=LORA, activation_checkpointing=True, **given
            ).evaluate()
        logged = {record.msg for record in caplog.records if record.levelname == "WARNING"}
        said.append({str(warning.message) for warning in caught} | logged)
    assert said[1] <= said[0]


@pytest.mark.parametrize("objective", ["descent", "erm"])
def test_examples_that_trl_drops_are_counted_once_with_the_remedy(tmp_path, caplog, objective):
    long = {"prompt": "Say " + "long " * 20, "completion": " words!"}

    def data(*_):
        return Dataset.from_list([*pairs(7), long])

    trainer = make(SFTDescentTrainer, tmp_path, data, max_length=60, objective=objective)
    trainer.evaluate_layers(data())
    said = [record.getMessage() for record in caplog.records if "dropped" in record.msg]

    assert [len(trainer.train_dataset), len(trainer.eval_dataset)] == [7, 7]
    assert len(said) == 2  # for training and evaluation
    assert said[0].startswith("TRL dropped 1 of the 8 examples of the train dataset: no token")
    assert "raise `max_length`" in said[0]


PROMPTS = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"loss_type": "dft"}, "`loss_type` is 'dft'"),
        ({"eval_packing": True, "max_length": 48}, "`eval_packing=True` without `packing`"),
        ({"peft_config": PROMPTS}, "PromptTuningConfig puts trained embeddings before the tokens"),
        ({"max_length": 4}, "no token with a label after masking .* `max_length`=4"),
        (
            {"data": [{"input_ids": [5, 6], "labels": [-100, -100]}], "packing": True},
            "no token with a label",
        ),
        (
            {"data": [{"text": "a" * 200}], "model": gpt2},
            "train dataset has a sequence of 201 tokens, but GPT2LMHeadModel has 128 positions; .* is 1024",
        ),
        (
            {"eval_data": [{"prompt": "a" * 200, "completion": "b"}], "model": gpt2},
            "eval dataset has a sequence",
        ),
    ],
)
def test_refusals_name_the_remedy(tmp_path, given, message):
    rows = {name: Dataset.from_list(given[name]) for name in ("data", "eval_data") if name in given}
    rows |= {"data": lambda *_, data=rows["data"]: data} if "data" in rows else {}
    with pytest.raises(ValueError, match=message):
        make(SFTDescentTrainer, tmp_path, **given | rows)


def test_rotations_go_on_beyond_the_positions_of_pretraining(tmp_path):
    data = {"data": lambda *_: Dataset.from_list([{"text": "ab" * 100}] * 8), "max_steps": 2}
    ours = trained(SFTDescentTrainer, tmp_path, **data, objective="erm")
    assert history(ours)[-2]["loss"] == history(trained(SFTTrainer, tmp_path, **data))[-2]["loss"]
    trained(SFTDescentTrainer, tmp_path, **data, **CONSTRAINED)


def test_packed_rows_may_be_longer_than_the_positions_of_a_document(tmp_path):
    given = {"packing": True, "max_length": 400, "data": plain, "model": gpt2}
    trainer = make(SFTDescentTrainer, tmp_path, **given, **CONSTRAINED)
    assert max(map(len, trainer.train_dataset["input_ids"])) > 128
    trainer.train()
    with pytest.raises(ValueError, match="128 positions"):
        make(SFTDescentTrainer, tmp_path, **given, packing_strategy="wrapped")


PACKED = {"packing": True, "max_length": 48}
STRUNG = {"padding_free": True, "max_length": None}


def language_model(name, **config):
    """A model whose layers all matter, which may have 128 positions."""
    model_class = getattr(transformers, name)
    fields = {**MODELS.get(name, MODELS["LlamaForCausalLM"]), "vocab_size": len(TOKENIZER)}
    fields.update(
        {size: 128 for size in ("max_position_embeddings", "n_positions") if size in fields}
    )
    return spread(model_class(model_class.config_class(**fields | config)))


KEEPS_APART = Version(transformers.__version__) >= Version("5.24")
FALCON = pytest.param(
    "Falcon", marks=pytest.mark.skipif(KEEPS_APART, reason="its packed documents are apart")
)


@pytest.mark.parametrize(
    "given", [PACKED, STRUNG, {**PACKED, "bf16": True}], ids=["packed", "strung", "bf16"]
)
@pytest.mark.parametrize("name", ["OPT", "Bloom", FALCON, "Mamba", "GptOss", "prefix tuning"])
def test_refuses_models_in_which_packed_documents_see_one_another(tmp_path, name, given):
    """Trained prompts stand before the first document alone."""
    model = (
        SETTINGS[name]
        if name in SETTINGS
        else {"model": lambda: language_model(f"{name}ForCausalLM")}
    )
    trainer = make(SFTDescentTrainer, tmp_path, **model, **given, **CONSTRAINED)
    with pytest.raises(ValueError, match="see one another.*`packing=False`"):
        trainer.train()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "name", ["LlamaForCausalLM", "Qwen3ForCausalLM", "GPT2LMHeadModel", "MistralForCausalLM"]
)
def test_packed_documents_are_read_as_they_are_apart(tmp_path, name, attention):
    settings = {
        "model": lambda: language_model(name, attn_implementation=attention),
        "data": plain,
        **CONSTRAINED,
    }
    packed, apart = (
        make(SFTDescentTrainer, tmp_path, **given, **settings).evaluate() for given in (PACKED, {})
    )
    for metric in ("eval_layer_loss_1", "eval_layer_loss_3"):
        assert packed[metric] == pytest.approx(apart[metric], rel=1e-5), metric
    make(SFTDescentTrainer, tmp_path, **settings, **PACKED, bf16=True).evaluate()


def test_one_document_in_a_row_sees_no_other(tmp_path):
    settings = {
        "model": lambda: language_model("OPTForCausalLM"),
        "per_device_train_batch_size": 1,
        **CONSTRAINED,
    }
    settings["per_device_eval_batch_size"] = 1
    strung, padded = (
        make(SFTDescentTrainer, tmp_path, **given, **settings) for given in (STRUNG, {})
    )

    assert strung.evaluate()["eval_loss"] == pytest.approx(padded.evaluate()["eval_loss"], rel=1e-5)

    strung.train()
    # A first row with one document, unlike those to come.
    long = {
        "data": lambda *_: Dataset.from_list(
            [{"text": "ab" * 40}, *({"text": "abc"} for _ in range(31))]
        )
    }
    packed = make(
        SFTDescentTrainer,
        tmp_path,
        **PACKED,
        **settings,
        **long,
        train_sampling_strategy="sequential",
    )

    assert len(packed.train_dataset[0]["seq_lengths"]) == 1

    with pytest.raises(ValueError, match="see one another"):
        packed.train()


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "OPTForCausalLM"])
def test_a_collator_that_flattens_is_tried_too(tmp_path, name):
    rows = [
        {"input_ids": list(range(5, 15 + index)), "labels": list(range(5, 15 + index))}
        for index in range(8)
    ]
    args = DescentConfig(
        str(tmp_path), max_steps=1, save_strategy="no", report_to="none", use_cpu=True
    )
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    trainer = DescentTrainer(language_model(name), args, train_dataset=rows, data_collator=collator)

    with (
        pytest.raises(ValueError, match="see one another")
        if name.startswith("OPT")
        else contextlib.nullcontext()
    ):
        trainer.train()


@pytest.mark.slow
def test_importing_the_package_needs_neither_trl_nor_peft():
    code = (
        "import sys\n"
        "sys.modules.update(trl=None, peft=None)\n"
        "import hf_descent\n"
        "from hf_descent import DescentTrainer, DescentConfig, EmbeddingNoise\n"
        "try:\n    hf_descent.SFTDescentTrainer\nexcept ImportError as error:\n    print(error)"
    )
    assert "`SFTDescentTrainer` needs trl: `pip install 'hf_descent[sft]'`" in python("-c", code)


@pytest.mark.parametrize("coefficient", [None, 5.0])
def test_the_router_s_loss_weighs_what_the_config_says(tmp_path, coefficient):
    routers = []

    for cls, given in ((SFTTrainer, {}), (SFTDescentTrainer, {"dual_warmup_steps": 1})):
        if coefficient is not None:
            given["router_aux_loss_coef"] = coefficient
        given.update(max_steps=1, optim="sgd", max_grad_norm=0.0)
        trainer = trained(cls, tmp_path, model=mixtral, learning_rate=1.0, **given)
        routers.append(
            [
                value
                for name, value in trainer.model.named_parameters()
                if name.endswith("gate.weight")
            ]
        )

    assert len(routers[0]) > 0

    torch.testing.assert_close(*routers, rtol=1e-4, atol=1e-7)


def test_rows_that_trl_leaves_to_the_collator_are_evaluated(tmp_path):
    def collate(rows):
        batch = TOKENIZER([row["text"] for row in rows], return_tensors="pt", padding=True)
        return {
            **batch,
            "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100),
        }

    rows = Dataset.from_list([{"text": f"ab{index}"} for index in range(12)])
    settings = {
        "dataset_kwargs": {"skip_prepare_dataset": True},
        "remove_unused_columns": False,
        "eval_data": rows,
    }
    trainer = make(
        SFTDescentTrainer, tmp_path, lambda: rows, keywords={"data_collator": collate}, **settings
    )
    loss = trainer.evaluate()["eval_loss"]

    assert trainer.evaluate_layers().losses[-1] == pytest.approx(loss, rel=1e-5)
