"""Modules of former versions can still be imported, and say what they are called now."""

import importlib
import sys

import pytest

from hf_descent import evaluation


@pytest.mark.parametrize(
    ("former", "names"),
    [
        ("profile", ["LayerProfile", "layer_profile", "layer_profiles"]),
        ("robustness", ["NoiseCurve", "noise_curve"]),
    ],
)
def test_a_former_module_warns_and_has_the_same_objects(former, names):
    name = f"hf_descent.evaluation.{former}"
    sys.modules.pop(name, None)
    with pytest.warns(FutureWarning, match="import from `hf_descent.evaluation`"):
        module = importlib.import_module(name)
    for name in names:
        assert getattr(module, name) is getattr(evaluation, name)
