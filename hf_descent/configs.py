"""Arguments of the descent objective, mixed into the ecosystem's training arguments."""

import ast
import contextlib
import dataclasses
import inspect
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from transformers import Seq2SeqTrainingArguments, TrainingArguments

from .compat import CheckpointingArguments
from .constraints.arguments import (
    LARGEST,
    SMALLEST,
    as_python,
    check_alpha,
    check_constrained_layers,
    check_initial_loss_bound,
    check_targets,
)
from .constraints.multipliers import OPTIMS, RESILIENCE_FORMS, check_choice
from .constraints.objectives import OBJECTIVES, Objective, objective_class
from .constraints.problem import PATHS


# What takes a Python value or its JSON text: for type checkers anything, for command lines text.
if TYPE_CHECKING:
    Json = Any
else:
    Json = str

# Take a number, a list or a word; on a command line, as text. Those that are lists alone take several words as well.
JSON_ARGUMENTS = (
    "descent_alpha", "initial_loss_bound", "constrained_layers", "exit_targets", "loss_targets", "fixed_multipliers",
    "max_last_layer_rise", "noise_gamma", "eval_gammas",
)  # fmt: skip
# What each of them takes, in words.
TAKES = {
    "descent_alpha": "a number in (0, 1), a list with one for each layer, 'auto', 'line' or 'steps'",
    "initial_loss_bound": "a number above 0, or 'auto'",
    "constrained_layers": "a list of layers, as [3, 6]",
    "exit_targets": "a mapping from layer to share, as {3: 0.05}",
    "loss_targets": "a mapping from layer to loss, as {3: 0.4}",
    "fixed_multipliers": "a list with a number for each constraint, or the folder of a constrained run",
    "max_last_layer_rise": "a share from 0 to 1, as 0.02 for 2 %, or None for no limit",
    "noise_gamma": "a noise level, or a range as [0, 0.5]",
    "eval_gammas": "noise levels, as [0, 0.5, 1]",
}
# The least and the greatest value of a number, where it is given.
LIMITS = {
    **dict.fromkeys(
        ("dual_learning_rate", "slack_learning_rate", "multiplier_max", "noise_sigma"),
        (SMALLEST, LARGEST),
    ),
    **dict.fromkeys(("dual_warmup_steps", "resilience", "penalty_coefficient"), (0.0, LARGEST)),
    **dict.fromkeys(("readout_token_fraction", "descent_strength"), (SMALLEST, 1.0)),
    "target_margin": (0.0, 0.5),
}
CHOICES = {
    "objective": OBJECTIVES,
    "dual_optim": OPTIMS,
    "resilience_form": RESILIENCE_FORMS,
    "negative_weights": ("keep", "clip", "detach"),
}
# Names of metrics, after any prefix: the loss of a layer, any value of one, what only an evaluation under constraints
# has, and what a worse last layer improves.
LAYER_LOSS = re.compile(r"layer_loss_\d+$")
PER_LAYER = re.compile(r"(layer_loss|violation|multiplier|weight)_(exit_|bound_)?\d+$")
CONSTRAINT_METRICS = ("max_violation", "feasible", "feasible_score")
RELATIVE_METRICS = ("descent_share", "largest_rise")


def _help_from_docstring(cls: type) -> type:
    """Use each argument's paragraph of the class docstring as its command-line help, so that the two cannot differ."""
    paragraphs = re.split(r"\n(?=\w+ \(`)", inspect.cleandoc(cls.__doc__).replace("\n    ", "\n\t"))
    helps = {}
    for paragraph in paragraphs:
        name = paragraph.split(" ", 1)[0]
        text = paragraph.split(":\n", 1)[-1].split("\n\n")[0]
        helps[name] = " ".join(text.split()).replace("%", "%%")
    for argument in dataclasses.fields(cls):
        argument.metadata = {**argument.metadata, "help": helps.get(argument.name, "")}
    return cls


@dataclass(frozen=True)
class DualSettings:
    """Settings of the dual step whose defaults depend on the constraints."""

    dual_optim: str = "adam"
    dual_learning_rate: float = 0.02
    dual_warmup_steps: float = 0.25
    target_margin: float = 0.02


# The defaults for targets alone, by measurement (docs/results.md).
DUAL_SETTINGS_OF_TARGETS = DualSettings("pi", 0.04, 0.0, 0.1)


@_help_from_docstring
@dataclass
class DescentArguments:
    """Arguments of layerwise descent training (arXiv 2601.17257).

    f_l is the task loss of the model if it stopped after layer l, f_L the loss of the last layer, and f_0 the loss of
    guessing. A constraint says what a layer must reach. Its violation is how far the layer is from that, and its
    multiplier is the weight with which training pushes the layer.

    Arguments that take a number, a list or "auto" also accept its JSON text. The defaults were chosen by measurement.
    If the paper does something else, the argument says so. The recipes have the paper's settings.

    > Parameters that control the problem

    objective (`str`, *optional*, defaults to `"descent"`):
        What is minimised: "descent" (f_L under the constraints), or a way to compare with: "erm" (f_L alone, plain
        training), "deep_supervision" (the same weight on every layer), "layerskip" (LayerSkip's early exit loss and
        gradual curriculum), "fixed" (multipliers that do not move), "hinge" or "quadratic" (penalties on the
        violations). Under gradient accumulation penalties are evaluated per micro-batch.
    descent_alpha (`float`, `list[float]`, `"auto"`, `"line"` or `"steps"`, *optional*):
        What each layer must do. A number alpha in (0, 1), or a list with one for each layer, is the paper's form: f_l
        must be at most (1 - alpha) times the loss of the layer before. "line": f_l must lie below
        the share `descent_strength` of an even descent, on a log scale, from f_0 to the present f_L. "steps": the
        paper's form, with the step sizes of that descent. "auto" is "line". Default: "line"; nothing if you give
        targets.
    exit_targets (`dict[int, float]`, *optional*):
        Maps a layer below the last to the share, 0 to 1, by which its loss may be above f_L. {3: 0.05} asks for
        f_3 <= 1.05 f_L. In a shell put it in quotes.
    loss_targets (`dict[int, float]`, *optional*):
        Maps a layer to the loss that it must be below, in units of the task loss.
    initial_loss_bound (`float` or `"auto"`, *optional*, defaults to `"auto"`):
        f_0, with which the first layer is compared, in units of the task loss. "auto": the loss of guessing (of the
        best constant prediction), estimated from a sample of the training labels.
    descent_strength (`float`, *optional*, defaults to `0.5`):
        The share of the way from f_0 down to f_L, on a log scale, that "line" and "steps" ask for.
    constrained_layers (`list[int]`, *optional*):
        The layers that `descent_alpha` constrains, 1-based and increasing; each is compared with the one before it in
        the list. Default: all layers. "deep_supervision" gives weight to these and the last layer.
    target_margin (`float`, *optional*):
        Training aims below each target by this share, because the loss hovers around what training aims at. The
        verdict is on the targets as they are given. Default: 0.02; 0.1 if you give only targets.

    > Parameters that control the dual step

    dual_learning_rate (`float`, *optional*):
        Step size of the multipliers. It is constant: no scheduler touches it. Default: 0.02, in [`SFTDescentConfig`]
        0.0002; 0.04 in "descent" if you give only targets and no `resilience`.
    dual_optim (`str`, *optional*):
        How multipliers move: "adam" (the paper's), "pi" (a controller that keeps them from swinging, on bounded
        violations; not with `resilience`) or "sgd" (in proportion to the violation). Default: "adam"; "pi" if you
        give only targets.
    normalize_violations (`bool`, *optional*, defaults to `True`):
        Divide the violations by f_0 in the dual step, which makes the dual settings independent of the scale of the
        loss. The paper's rule is Adam on raw violations (`False`).
    max_last_layer_rise (`float`, *optional*, defaults to `0.02`):
        While the last layer's loss is above its best value so far in this run by more than this share, the
        multipliers of "descent" stand still, and if that lasts they shrink: constraints give way. It is no limit on
        the price: it sees a rise, not what plain training would have reached. `None` turns it off, as in the paper.
    dual_warmup_steps (`float`, *optional*):
        Warm-up: how many optimizer steps pass before the constraints act. A number below 1 is a share of all steps.
        Default: 0.25; 0 if you give only targets. The paper's video runs use one epoch.
    dual_holdout (`float`, *optional*):
        No longer an option, and accepted only as `None`: give the trainer a `dual_dataset`.
    resilience (`float`, *optional*, defaults to `0.0`):
        Resilience coefficient c >= 0. A constraint that cannot be met is relaxed: once training settles, it may be
        violated by c times its multiplier, in units of f_0 (of the loss, without `normalize_violations`). 0 keeps
        constraints hard.
    resilience_form (`str`, *optional*, defaults to `"weight_decay"`):
        How the relaxation is reached: "weight_decay" of the multipliers (the paper's language runs) or explicit
        "slack" variables (its video runs). Both settle at the same point.
    slack_learning_rate (`float`, *optional*, defaults to `0.02`):
        Step size of the slacks with `resilience_form="slack"`.
    slack_restart (`bool`, *optional*, defaults to `True`):
        Set these slacks back to 0 after every epoch, as the paper does.
    multiplier_max (`float`, *optional*):
        Cap on every multiplier. Default: no cap.

    > Parameters that control the primal step

    negative_weights (`str`, *optional*, defaults to `"clip"`):
        A constraint that compares two layers lowers the loss of one and, by a negative weight, raises the loss of the
        other. "keep" allows this (the paper's form). "clip" sets negative weights to 0. "detach" takes the loss of the
        other layer for a constant. Lines and targets are always taken as with "detach". For the penalties "hinge" and
        "quadratic", "clip" acts like "keep".
    normalize_weights (`bool`, *optional*, defaults to `False`):
        Divide the weights of the layer losses by the sum of their absolute values, so that growing multipliers do not
        act as a larger learning rate; not for "hinge" and "quadratic".
    penalty_coefficient (`float`, *optional*, defaults to `1.0`):
        Coefficient of the intermediate losses in "deep_supervision", and of the penalty in "hinge" and "quadratic". In
        "layerskip" it is the scale of the early exits, 0 to 1.
    fixed_multipliers (`str` or `list[float]`, *optional*):
        Multipliers of the objective "fixed": one per constraint (by default a layer), or the folder of a constrained
        run, whose final multipliers and problem are used.

    > Parameters that control the readout of large vocabularies

    readout_token_fraction (`float`, *optional*):
        Share of the labelled tokens, in (0, 1], on which the lower layers of a language model are read. Default: 1/10
        for a vocabulary of 8192 or more, else 1. The last layer is read on all tokens. In training, every layer
        draws tokens of its own; only a layer and the one it is compared with use the same. Layers without weight
        are read on a quarter as many. In evaluations of `eval_strategy` all layers are read on the same tokens. The
        losses are unbiased; the penalties "hinge" and "quadratic" come out too high.

    > Parameters that control the noise

    noise_gamma (`float` or `list[float]`, *optional*, defaults to `0.0`):
        Noise on the input embeddings (or pixels) in training, in units of the clean signal's standard deviation: one
        level, or [low, high] for a level drawn uniformly per sample.
    noise_sigma (`float`, *optional*):
        The standard deviation of the clean signal. Default: the value in the model's config, if it has one; else it is
        estimated from 2,048 training examples, and saved in the config.
    eval_gammas (`list[float]`, *optional*):
        Noise levels of `evaluate_robustness`.
    """

    dual_defaults: ClassVar[DualSettings] = DualSettings()

    objective: str = field(default="descent")
    descent_alpha: Json | None = field(default=None)
    exit_targets: Json | None = field(default=None)
    loss_targets: Json | None = field(default=None)
    initial_loss_bound: Json = field(default="auto")
    descent_strength: float = field(default=0.5)
    constrained_layers: list[Json] | None = field(default=None)
    target_margin: float | None = field(default=None)
    dual_learning_rate: float | None = field(default=None)
    dual_optim: str | None = field(default=None)
    normalize_violations: bool = field(default=True)
    max_last_layer_rise: Json | None = field(default=0.02)
    dual_warmup_steps: float | None = field(default=None)
    dual_holdout: float | None = field(default=None)
    resilience: float = field(default=0.0)
    resilience_form: str = field(default="weight_decay")
    slack_learning_rate: float = field(default=0.02)
    slack_restart: bool = field(default=True)
    multiplier_max: float | None = field(default=None)
    negative_weights: str = field(default="clip")
    normalize_weights: bool = field(default=False)
    penalty_coefficient: float = field(default=1.0)
    fixed_multipliers: Json | None = field(default=None)
    readout_token_fraction: float | None = field(default=None)
    noise_gamma: Json = field(default=0.0)
    noise_sigma: float | None = field(default=None)
    eval_gammas: list[Json] | None = field(default=None)

    def __init_subclass__(cls):
        own = cls.__doc__
        shared = inspect.cleandoc(DescentArguments.__doc__)
        cls.__doc__ = shared if own is None else f"{own}\n\n{shared}"

    def __post_init__(self):
        if isinstance(self, TrainingArguments):  # else it is for a loop without a Trainer
            super().__post_init__()
            self._set_direction_of_metric()
        self.check_descent_arguments()

    def _set_direction_of_metric(self) -> None:
        """Say that small losses of layers and violations are good; TrainingArguments knows names in "loss" alone."""
        name = self.metric_for_best_model
        if name is None:
            return
        if LAYER_LOSS.search(name) or name.endswith("max_violation"):
            self.greater_is_better = False

    def check_descent_arguments(self) -> None:
        """Parse JSON texts and check every descent argument; ValueError names the argument, its value and the remedy.

        Called again when training starts, since a hyperparameter search sets the arguments one by one.
        """
        self._parse()
        self._check_choices()
        self._check_numbers()
        self._check_targets()
        self._check_constraints()
        self._check_dual_step()
        self._check_guard()
        self._check_baselines()
        self._check_noise()
        self._check_metric()

    def _parse(self) -> None:
        """Make Python values of numbers of other kinds, and of JSON texts."""
        for argument in dataclasses.fields(DescentArguments):
            name = argument.name
            value = getattr(self, name)

            if name in JSON_ARGUMENTS:
                setattr(self, name, _parsed(name, value))
            elif argument.type in (float, float | None):
                is_unset = value is None and argument.default is None
                # A search casts to the type of the value it finds, so an int would truncate.
                setattr(self, name, value if is_unset else _as_float(name, value))

        if isinstance(self.eval_gammas, int | float):
            self.eval_gammas = [self.eval_gammas]

    def _check_choices(self) -> None:
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            is_unset = value is None and name == "dual_optim"
            if not is_unset:
                check_choice(name, value, choices)

    def _check_numbers(self) -> None:
        for name, (least, most) in LIMITS.items():
            value = getattr(self, name)
            if value is None or value == least:
                continue
            # Between 0 and the smallest number nothing can be divided or squared.
            if not max(least, SMALLEST) <= value <= most:
                raise ValueError(
                    f"`{name}` is {value}; give a number between {least:g} and {most:g}."
                )

    def _check_targets(self) -> None:
        for name in ("exit_targets", "loss_targets"):
            targets = check_targets(name, getattr(self, name))
            if not targets:
                targets = None
            setattr(self, name, targets)

        if self.exit_targets is not None:
            _check_shares(self.exit_targets)

    def _check_constraints(self) -> None:
        if self.layer_rows is not None and not self.follows:
            check_alpha(self.descent_alpha)
        if self.initial_loss_bound != "auto":
            check_initial_loss_bound(self.initial_loss_bound)
        check_constrained_layers(self.constrained_layers)

        is_descent = self.objective_class.moves_multipliers
        if self.constrained_layers and is_descent and self.layer_rows is None:
            raise ValueError(
                f"`constrained_layers` is {self.constrained_layers}, which does nothing beside targets alone: add "
                "descent_alpha='line' to your targets, or leave it out."
            )

    def _check_dual_step(self) -> None:
        if self.dual_holdout is not None:
            raise ValueError(
                f"`dual_holdout` is {self.dual_holdout}, which is no longer an option: hold examples out of your "
                "training data, and give them to the trainer as `dual_dataset=`."
            )

        settings = self.dual_settings
        if settings.dual_optim == "pi" and self.resilience:
            raise ValueError(
                f"`resilience` is {self.resilience}, which is not for `dual_optim` 'pi': choose 'adam'."
            )

        warmup = settings.dual_warmup_steps
        if warmup > 1 and not warmup.is_integer():
            raise ValueError(
                f"`dual_warmup_steps` is {warmup}; give whole steps, or a share below 1."
            )

    def _check_guard(self) -> None:
        share = self.max_last_layer_rise
        if share is None:
            return
        is_number = isinstance(share, int | float) and not isinstance(share, bool)
        if not is_number or not 0 <= share <= 1:
            raise ValueError(
                f"`max_last_layer_rise` is {share!r}; give a share from 0 to 1 (0.02 for 2 %), or `None` "
                "for no limit."
            )

    def _check_baselines(self) -> None:
        multipliers = self.fixed_multipliers
        if multipliers is None and not self.objective_class.takes_multipliers:
            return
        if not isinstance(multipliers, str | list):
            raise ValueError(
                f"`fixed_multipliers` is {multipliers!r}; give a constrained run or a list."
            )

    def _check_noise(self) -> None:
        _check_levels("noise_gamma", self.noise_gamma)
        if self.eval_gammas is not None:
            _check_levels("eval_gammas", self.eval_gammas)

        gamma = self.noise_gamma
        if isinstance(gamma, list) and (len(gamma) != 2 or gamma[0] > gamma[1]):
            raise ValueError(f"`noise_gamma` is {gamma}; a range is [low, high] with low <= high.")

    def _check_metric(self) -> None:
        metric = getattr(self, "metric_for_best_model", None)
        if metric is not None and metric.endswith(RELATIVE_METRICS):
            raise ValueError(
                f"`metric_for_best_model` is {metric!r}, which a worse last layer improves: choose by "
                "'feasible_score' or the loss."
            )

    @property
    def objective_class(self) -> type[Objective]:
        """What is minimised, as a class that says how."""
        return objective_class(self.objective)

    @property
    def dual_settings(self) -> DualSettings:
        """The settings of the dual step; those that were not given have the defaults of the constraints."""
        defaults = self.dual_defaults
        has_targets_alone = self.layer_rows is None and not self.resilience
        if self.objective_class.moves_multipliers and has_targets_alone:
            defaults = DUAL_SETTINGS_OF_TARGETS

        values = {}
        for name, default in vars(defaults).items():
            value = getattr(self, name)
            values[name] = default if value is None else value
        return DualSettings(**values)

    @property
    def layer_rows(self) -> float | list[float] | str | None:
        """What `descent_alpha` comes to: step sizes, "line", "steps", or `None` if there are targets alone."""
        if self.descent_alpha is None and self.states_constraints:
            return None
        if self.descent_alpha in (None, "auto"):
            return PATHS[0]
        return self.descent_alpha

    @property
    def states_constraints(self) -> bool:
        """Whether constraints were asked for, rather than left at their default."""
        stated = (self.descent_alpha, self.exit_targets, self.loss_targets)
        return any(argument is not None for argument in stated)

    @property
    def follows(self) -> bool:
        """Whether the constraints follow the loss of the last layer."""
        return self.layer_rows in PATHS

    @property
    def compares_neighbours(self) -> bool:
        """Whether constraints compare a layer with the one before it."""
        return self.layer_rows not in (None, "line")

    @property
    def gamma_train(self) -> float:
        """The noise level of training; of a range the upper end."""
        return upper_level(self.noise_gamma)

    @classmethod
    def from_training_arguments(cls, args: TrainingArguments, **fields: Any) -> "DescentArguments":
        """The same training arguments with the descent arguments added: `fields`, and defaults for the rest.

        Arguments that this class does not have (a subclass's own, or set by hand) stay attributes of the result;
        methods of a subclass do not.
        """
        if isinstance(args, cls) and not fields:
            return args

        own = {argument.name for argument in dataclasses.fields(cls) if argument.init}
        arguments = {
            argument.name: getattr(args, argument.name)
            for argument in dataclasses.fields(args)
            if argument.init and argument.name in own
        }
        arguments.update(fields)
        config = cls(**arguments)

        for name, value in vars(args).items():
            if not hasattr(config, name):
                setattr(config, name, value)
        # Set to 1 by hand to keep `nn.DataParallel` off.
        config._n_gpu = min(args.n_gpu, config.n_gpu)
        return config


@dataclass
class DescentConfig(DescentArguments, CheckpointingArguments, TrainingArguments):
    """Arguments of [`DescentTrainer`]: [`~transformers.TrainingArguments`] and the following."""


@dataclass
class Seq2SeqDescentConfig(DescentArguments, CheckpointingArguments, Seq2SeqTrainingArguments):
    """Arguments of [`Seq2SeqDescentTrainer`]: [`~transformers.Seq2SeqTrainingArguments`] and the following."""


def upper_level(noise_gamma: float | list[float] | None) -> float | None:
    """The level, of a range the upper end."""
    if isinstance(noise_gamma, list):
        return noise_gamma[-1]
    return noise_gamma


def levels_of(name: str, levels: Any) -> list[float]:
    """The noise levels in the argument `name`, a number or several in any sequence; ValueError if it is none."""
    numbers = as_python(levels)
    if not isinstance(numbers, Iterable):
        numbers = [numbers]
    try:
        return [float(number) for number in numbers]
    except (TypeError, ValueError):
        raise ValueError(
            f"`{name}` is {levels!r}; give a noise level, or several: numbers, not negative."
        ) from None


def _check_levels(name: str, levels: Any) -> None:
    if not all(0 <= level < math.inf for level in levels_of(name, levels)):
        raise ValueError(f"`{name}` is {levels}; noise levels must be numbers, not negative.")


def _check_shares(exit_targets: Mapping[int, float]) -> None:
    """ValueError for percentages in place of shares."""
    for layer, share in exit_targets.items():
        if share > 1:
            raise ValueError(
                f"`exit_targets` is {exit_targets}: of layer {layer} it asks for a loss that is at most "
                f"{100 * share:g} % higher than the last layer's. Give shares of at most 1; {share:g} % is "
                f"{{{layer}: {share / 100:g}}}."
            )


def _as_float(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"`{name}` is {value!r}; it must be a number.") from None


def _parsed(name: str, value: Any) -> Any:
    """A Python value from itself, an array, its JSON text or texts; words, None and a folder of multipliers stay."""
    value = as_python(value)
    if isinstance(value, os.PathLike):
        value = os.fspath(value)

    if isinstance(value, list):
        items = [_parsed(name, item) for item in value]
        is_one_list = len(items) == 1 and isinstance(
            items[0], list
        )  # a list as one word of a command line
        return items[0] if is_one_list else items

    if not isinstance(value, str) or value in ("auto", *PATHS):
        return value
    if name == "fixed_multipliers" and not value.startswith("["):
        return value

    for parse in (json.loads, float, ast.literal_eval):  # JSON has neither `.5` nor `{3: 0.05}`
        with contextlib.suppress(ValueError, SyntaxError):
            return parse(value)
    raise ValueError(f"`{name}` is {value!r}; give {TAKES[name]}.")
