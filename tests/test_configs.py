import dataclasses
import inspect
import json
import re

import numpy as np
import pytest
import torch
import yaml
from transformers import HfArgumentParser, Seq2SeqTrainingArguments, TrainingArguments

from hf_descent import DescentConfig, Seq2SeqDescentConfig
from hf_descent.configs import JSON_ARGUMENTS, TAKES, DescentArguments


PARSED = {
    "descent_alpha": [0.1, 0.2, 0.3], "initial_loss_bound": 0.69, "constrained_layers": [1, 3],
    "exit_targets": {1: 0.05, 2: 0.0}, "loss_targets": {3: 0.4}, "noise_gamma": [0.0, 1.5], "eval_gammas": [0, 0.5, 1],
    "objective": "hinge", "multiplier_max": 5.0, "max_last_layer_rise": 0.1,
}  # fmt: skip


GENERATION = {"predict_with_generate": True, "generation_max_length": 9, "generation_num_beams": 2}


@pytest.mark.parametrize(
    ("config_class", "given"),
    [(DescentConfig, PARSED), (Seq2SeqDescentConfig, PARSED | GENERATION)],
)
def test_python_values_command_line_and_yaml_agree(tmp_path, config_class, given):
    parser = HfArgumentParser(config_class)
    words = {
        name: json.dumps(value) if isinstance(value, dict | list) else value
        for name, value in given.items()
    }
    flags = [f"--{name}={value}" for name, value in words.items()]
    (by_flags,) = parser.parse_args_into_dataclasses([f"--output_dir={tmp_path}", *flags])
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({"output_dir": str(tmp_path), **given}))
    (by_file,) = parser.parse_yaml_file(str(file))
    by_hand = config_class(str(tmp_path), **given)
    for name, value in given.items():
        assert (
            getattr(by_hand, name) == getattr(by_flags, name) == getattr(by_file, name) == value
        ), name


@pytest.mark.parametrize("word", ["None", "null"])
def test_the_limit_on_the_last_layer_s_rise_can_be_turned_off_everywhere(tmp_path, word):
    parser = HfArgumentParser(DescentConfig)
    assert DescentConfig(str(tmp_path)).max_last_layer_rise == 0.02

    flags = [f"--output_dir={tmp_path}", f"--max_last_layer_rise={word}"]
    (by_flags,) = parser.parse_args_into_dataclasses(flags)
    file = tmp_path / "config.yaml"
    file.write_text(f"output_dir: {tmp_path}\nmax_last_layer_rise: {word}\n")
    (by_file,) = parser.parse_yaml_file(str(file))
    by_hand = DescentConfig(str(tmp_path), max_last_layer_rise=None)
    for config in (by_flags, by_file, by_hand):
        assert config.max_last_layer_rise is None


@pytest.mark.parametrize(
    ("targets", "meant"), [({3: 5}, r"5 % is \{3: 0.05\}"), ("{1: 0.1, 2: 12.5}", r"12.5 % is \{2: 0.125\}")]
)  # fmt: skip
def test_shares_are_no_percentages(targets, meant):
    with pytest.raises(ValueError, match=f"`exit_targets` is .* % higher.*at most 1; {meant}"):
        DescentArguments(exit_targets=targets)
    assert DescentArguments(exit_targets={1: 1}).exit_targets == {1: 1.0}


def test_lists_are_given_as_words_too(tmp_path):
    parser = HfArgumentParser(DescentConfig)
    for words, levels in (("0 0.5 1", [0, 0.5, 1]), ("0.5", [0.5]), ("[]", []), ("[0.5]", [0.5])):
        flags = [
            f"--output_dir={tmp_path}",
            "--constrained_layers",
            "1",
            "3",
            "--eval_gammas",
            *words.split(),
        ]
        (config,) = parser.parse_args_into_dataclasses(flags)
        assert config.eval_gammas == levels and config.constrained_layers == [1, 3]
    with pytest.raises(ValueError, match="`eval_gammas` is 'half'"):
        parser.parse_args_into_dataclasses(
            [f"--output_dir={tmp_path}", "--eval_gammas", "0", "half"]
        )


def test_a_command_line_s_numbers_need_no_digit_on_either_side_of_the_point(tmp_path):
    flags = "--noise_gamma .5 --eval_gammas 0 .5 --descent_alpha .1 --initial_loss_bound 1."
    (args,) = HfArgumentParser(DescentConfig).parse_args_into_dataclasses(
        [f"--output_dir={tmp_path}", *flags.split()]
    )
    assert (args.noise_gamma, args.eval_gammas) == (0.5, [0, 0.5])
    assert (args.descent_alpha, args.initial_loss_bound) == (0.1, 1.0)


def test_numbers_and_paths_of_any_kind_become_python_s_own(tmp_path):
    alpha, levels, layers = torch.full((3,), 0.25), [np.float32(0.5)], range(2, 4)
    given = {
        "descent_alpha": alpha,
        "eval_gammas": levels,
        "constrained_layers": layers,
        "fixed_multipliers": tmp_path,
    }
    args = DescentConfig(str(tmp_path), objective="fixed", dual_learning_rate=1, **given)
    assert repr([args.dual_learning_rate, *(getattr(args, name) for name in given)]) == (
        f"[1.0, [0.25, 0.25, 0.25], [0.5], [2, 3], {str(tmp_path)!r}]"
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ("adam", 0.02, 0.25, 0.02)),
        ({"exit_targets": {2: 0.1}}, ("pi", 0.04, 0.0, 0.1)),
        (
            {"exit_targets": {2: 0.1}, "dual_optim": "adam", "dual_learning_rate": 0.02},
            ("adam", 0.02, 0.0, 0.1),
        ),
        (
            {"loss_targets": {2: 0.4}, "dual_learning_rate": 0.3, "dual_warmup_steps": 5},
            ("pi", 0.3, 5.0, 0.1),
        ),
        ({"exit_targets": {2: 0.1}, "descent_alpha": "line"}, ("adam", 0.02, 0.25, 0.02)),
        ({"exit_targets": {2: 0.1}, "resilience": 0.01}, ("adam", 0.02, 0.25, 0.02)),
        ({"exit_targets": {2: 0.1}, "objective": "hinge"}, ("adam", 0.02, 0.25, 0.02)),
    ],
)
def test_targets_alone_have_dual_settings_of_their_own(tmp_path, given, expected):
    later, before = DescentConfig(tmp_path), DescentConfig(tmp_path, loss_targets={1: 1.0})
    for name, value in given.items():
        setattr(later, name, value)
    later.check_descent_arguments()  # as for the trials of a search
    converted = DescentConfig.from_training_arguments(before, **{"loss_targets": None} | given)
    for args in (DescentConfig(tmp_path, **given), later, converted):
        assert dataclasses.astuple(args.dual_settings) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "line"), ({"descent_alpha": "auto"}, "line"), ({"descent_alpha": "steps"}, "steps"),
        ({"exit_targets": {1: 0.1}}, None), ({"loss_targets": "{\"1\": 0.1}"}, None),
        ({"exit_targets": "{1: .1}"}, None),
        ({"exit_targets": {1: 0.1}, "descent_alpha": "auto"}, "line"), ({"descent_alpha": 0.2}, 0.2),
    ],
)  # fmt: skip
def test_targets_alone_leave_no_other_rows(tmp_path, given, expected):
    assert DescentConfig(str(tmp_path), **given).layer_rows == expected


@pytest.mark.parametrize(("gamma", "upper"), [(0.5, 0.5), ([0.0, 1.5], 1.5), ([0.5, 0.5], 0.5)])
def test_the_noise_level_of_training_is_the_upper_end_of_its_range(tmp_path, gamma, upper):
    assert DescentConfig(str(tmp_path), noise_gamma=gamma).gamma_train == upper


def test_auto_is_the_default_on_the_command_line_too(tmp_path):
    (config,) = HfArgumentParser(DescentConfig).parse_args_into_dataclasses(
        [f"--output_dir={tmp_path}"]
    )
    assert (
        config.layer_rows == "line"
        and config.initial_loss_bound == "auto"
        and config.objective == "descent"
    )
    assert config == DescentConfig(str(tmp_path))


def test_help_is_the_docstring_and_defaults_are_the_documented_ones():
    paragraphs = re.findall(
        r"^(\w+) \((.*?)\):\n((?:    .*\n?)+)", inspect.getdoc(DescentArguments), re.MULTILINE
    )
    documented = {name: (head, " ".join(body.split())) for name, head, body in paragraphs}
    fields = {field.name: field for field in dataclasses.fields(DescentArguments)}
    assert documented.keys() == fields.keys()
    for name, (head, body) in documented.items():
        assert fields[name].metadata["help"].replace("%%", "%") == body, name
        default = fields[name].default
        assert (
            f'defaults to `"{default}"`' if isinstance(default, str) else f"defaults to `{default}`"
        ) in head or (default is None and "defaults" not in head), name
    assert "descent_alpha" in DescentConfig.__doc__


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"objective": "descend"}, "objective.*descend.*choose one of"),
        ({"dual_optim": "adamw"}, "dual_optim"),
        ({"resilience_form": "none"}, "resilience_form"),
        ({"negative_weights": "drop"}, "negative_weights"),
        ({"descent_alpha": 1.0}, "descent_alpha"),
        ({"descent_alpha": [0.1, -0.2]}, "descent_alpha"),
        ({"descent_alpha": "much"}, "descent_alpha.*'much'"),
        ({"initial_loss_bound": 0}, "initial_loss_bound"),
        ({"constrained_layers": [3, 1]}, "constrained_layers"),
        ({"dual_learning_rate": -0.1}, "dual_learning_rate.*-0.1"),
        ({"dual_learning_rate": float("nan")}, "dual_learning_rate"),
        ({"slack_learning_rate": 0.0}, "slack_learning_rate"),
        ({"resilience": -1.0}, "resilience"),
        ({"multiplier_max": 0.0}, "multiplier_max"),
        ({"descent_strength": 0.0}, "descent_strength"),
        ({"noise_gamma": -0.5}, "noise_gamma"),
        ({"noise_gamma": [1.0, 0.5]}, "low <= high"),
        ({"noise_gamma": [0.1, 0.2, 0.3]}, "low <= high"),
        ({"noise_gamma": float("inf")}, "noise_gamma"),
        ({"eval_gammas": [0.1, -1]}, "eval_gammas"),
        (
            {"dual_warmup_steps": -1, "descent_alpha": 0.1, "initial_loss_bound": 1.0},
            "dual_warmup_steps",
        ),
        ({"dual_warmup_steps": 2.5}, "whole steps"),
        ({"objective": "fixed"}, "fixed_multipliers"),
        ({"objective": "fixed", "fixed_multipliers": 0.5}, "fixed_multipliers.*0.5"),
        (
            {"metric_for_best_model": "eval_descent_share"},
            "a worse last layer improves: choose by 'feasible_score'",
        ),
        ({"descent_strength": 1.5}, "descent_strength"),
        (
            {"exit_targets": {1: 0.1}, "constrained_layers": [2]},
            "add descent_alpha='line' to your targets",
        ),
        *(
            ({"readout_token_fraction": value}, "readout_token_fraction")
            for value in (0.0, 1.5, float("nan"))
        ),
        ({"exit_targets": {1: -0.1}}, "exit_targets"),
        ({"loss_targets": [0.4]}, "loss_targets"),
        ({"target_margin": 0.9}, "target_margin"),
        ({"exit_targets": {1.5: 0.1}}, "exit_targets"),
        ({"descent_alpha": "three"}, "`descent_alpha` is 'three'.*'line' or 'steps'"),
        ({"max_last_layer_rise": -0.1}, "`max_last_layer_rise` is -0.1; give a share"),
        (
            {"max_last_layer_rise": 2},
            "`max_last_layer_rise` is 2; give a share from 0 to 1 .0.02 for 2 %",
        ),
        ({"exit_targets": {1: True}}, "`exit_targets` is {1: True}"),
        ({"loss_targets": {1: True}}, "`loss_targets` is {1: True}"),
        ({"max_last_layer_rise": float("nan")}, "max_last_layer_rise.*nan"),
        ({"max_last_layer_rise": [0.1]}, "max_last_layer_rise"),
        ({"max_last_layer_rise": True}, "max_last_layer_rise.*True"),
        ({"max_last_layer_rise": "off"}, "`max_last_layer_rise` is 'off'.*None for no limit"),
        ({"exit_targets": "three"}, r"`exit_targets` is 'three'.*\{3: 0\.05\}"),
    ],
)
def test_bad_values_are_named_with_a_remedy(tmp_path, arguments, match):
    with pytest.raises(ValueError, match=match):
        DescentConfig(str(tmp_path), **arguments)


def test_conversion_keeps_every_argument_and_a_subclass_s_own(tmp_path, monkeypatch):
    args = Seq2SeqTrainingArguments(
        str(tmp_path), learning_rate=3e-4, report_to="none", warmup_steps=7, generation_max_length=9, seed=5,
        lr_scheduler_type="cosine", eval_strategy="steps", eval_steps=11, lr_scheduler_kwargs={"num_cycles": 2},
    )  # fmt: skip
    args.mine, args._n_gpu = "set by hand", 1  # the latter keeps data parallelism off
    monkeypatch.setattr(DescentConfig, "n_gpu", 4)
    config = DescentConfig.from_training_arguments(args, descent_alpha=0.2)
    assert config.mine == "set by hand" and config._n_gpu == 1
    for field in dataclasses.fields(TrainingArguments):
        if field.init:
            assert getattr(config, field.name) == getattr(args, field.name), field.name
    assert config.generation_max_length == 9 and config.descent_alpha == 0.2
    assert DescentConfig.from_training_arguments(config) is config


@pytest.mark.parametrize(
    ("metric", "greater"),
    [
        ("eval_layer_loss_2", False),
        ("max_violation", False),
        ("loss", False),
        ("feasible_score", True),
    ],
)
def test_smaller_losses_and_violations_are_better(tmp_path, metric, greater):
    numbers = {"descent_alpha": 0.1, "initial_loss_bound": 1.0}
    args = DescentConfig(str(tmp_path), metric_for_best_model=metric, use_cpu=True, **numbers)
    assert args.greater_is_better is greater
    stock = TrainingArguments(str(tmp_path), metric_for_best_model=metric, use_cpu=True)
    assert DescentConfig.from_training_arguments(stock, **numbers).greater_is_better is greater


def test_text_that_is_no_value_is_told_what_this_argument_takes(tmp_path):
    for name in JSON_ARGUMENTS:
        if name == "fixed_multipliers":  # where text is a folder
            continue
        with pytest.raises(
            ValueError, match=re.escape(f"`{name}` is 'layer3'; give {TAKES[name]}.")
        ):
            DescentConfig(tmp_path, **{name: "layer3"})

    with pytest.raises(ValueError, match=r"give a mapping from layer to share, as {3: 0.05}"):
        DescentConfig(tmp_path, exit_targets="layer3")
