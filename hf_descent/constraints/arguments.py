"""Checks of the arguments of a problem, for the problem itself and for the config of a training."""

import math
from collections.abc import Mapping, Sequence
from typing import Any


# Settings beyond these would leave float32 when they are multiplied, divided or squared.
SMALLEST = 1e-12
LARGEST = 1e12


def check_targets(
    name: str, targets: Mapping[int, float] | None, num_layers: int | None = None
) -> dict[int, float]:
    """`targets` as numbers by layer, sorted; ValueError if a value is no target, or a layer cannot have one."""
    if targets is None:
        return {}
    takes_last = name != "exit_targets"
    least = SMALLEST if takes_last else 0.0
    last = math.inf
    if num_layers is not None:
        last = num_layers if takes_last else num_layers - 1

    try:
        # By way of text: "3", as JSON has it, is a layer, but True and 3.0 are not.
        numbers = {int(f"{layer}"): _target_number(value) for layer, value in targets.items()}
    except (AttributeError, TypeError, ValueError):
        numbers = None
    is_good = numbers is not None and all(
        1 <= layer <= last and least <= value <= LARGEST for layer, value in numbers.items()
    )
    if not is_good:
        what = "the share by which its loss may be above f_L, 0 or more: {1: 0.05}"
        if takes_last:
            what = "its loss, above 0: {1: 0.4}"
        raise ValueError(
            f"`{name}` is {targets!r}; give {_layers_up_to(last)}, and for each {what}."
        )
    return dict(sorted(numbers.items()))


def _layers_up_to(last: float) -> str:
    if last == 0:
        return "layers below the last (this model has one layer)"
    if math.isinf(last):
        return "layers from 1 on"
    return f"layers 1 to {last}"


def _target_number(value: Any) -> float:
    """TypeError for true and false, which would be 1 and 0."""
    number = as_python(value)
    if isinstance(number, bool):
        raise TypeError(f"{number} is no number")
    return float(number)


def check_alpha(
    alpha: float | Sequence[float], num_layers: int | None = None, name="descent_alpha"
) -> list[float]:
    """`alpha` as a list of floats in (0, 1), one per layer where `num_layers` is given; ValueError otherwise."""
    values = as_python(alpha)
    if not isinstance(values, list):
        values = [values] * (1 if num_layers is None else num_layers)
    try:
        values = [float(value) for value in values]
    except (TypeError, ValueError):
        raise ValueError(
            f"`{name}` is {alpha!r}; give a number in (0, 1), or one per layer."
        ) from None
    if num_layers is not None and len(values) != num_layers:
        raise ValueError(
            f"`{name}` has {len(values)} values but the model has {num_layers} layers: give one for each."
        )

    if not values or not all(0.0 < value < 1.0 for value in values):
        raise ValueError(f"`{name}` is {alpha}; every step size must lie strictly between 0 and 1.")
    return values


def check_initial_loss_bound(bound: float) -> float:
    """`bound` as a float within float32's reach; ValueError otherwise."""
    value = as_python(bound)
    if not (isinstance(value, int | float) and SMALLEST <= value <= LARGEST):
        raise ValueError(
            f"`initial_loss_bound` is {bound}; f_0 must be positive and finite, between {SMALLEST:g} and {LARGEST:g}: "
            "use the loss of the best constant predictor (log of the number of classes for balanced classification) "
            "or 'auto'."
        )
    return float(value)


def check_constrained_layers(
    layers: Sequence[int] | None, num_layers: int | None = None
) -> list[int] | None:
    """`layers` as an increasing list of 1-based layers (all of them for `None`); ValueError otherwise."""
    if layers is None and num_layers is None:
        return None
    if layers is None:
        return list(range(1, num_layers + 1))

    values = as_python(layers)
    are_numbers = isinstance(values, list) and all(isinstance(layer, int) for layer in values)
    if not are_numbers or not values or values != sorted({*values}) or values[0] < 1:
        raise ValueError(
            f"`constrained_layers` is {layers!r}; give a list of increasing integers from 1 on."
        )
    if num_layers is not None and values[-1] > num_layers:
        raise ValueError(
            f"`constrained_layers` names layer {values[-1]} but the model has {num_layers} layers."
        )
    return values


def as_python(value: Any) -> Any:
    """`value` in Python's own numbers and lists if it is an array, a number of an array, or a sequence; else
    itself."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, list | tuple | range):
        return [as_python(item) for item in value]
    return value
