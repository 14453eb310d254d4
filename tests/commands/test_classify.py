import numpy as np
import pytest
from transformers import EvalPrediction

from hf_descent.commands.classify import ModelArguments, accuracy_of


@pytest.mark.parametrize("extra", [(), (np.zeros((4, 8, 16)),)], ids=["logits", "with the states of an encoder"])
def test_accuracy_is_that_of_the_logits(extra):
    logits = np.eye(3)[[0, 1, 2, 2]]
    predictions = (logits, *extra) if extra else logits
    assert accuracy_of(EvalPrediction(predictions, np.array([0, 1, 2, 0]))) == {"accuracy": 0.75}


def test_a_ut_has_no_layers_for_adapters():
    with pytest.raises(ValueError, match="`unrolled_layers` takes neither `use_peft`"):
        ModelArguments("encoder", unrolled_layers=2, use_peft=True)
