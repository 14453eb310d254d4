import numpy as np
import pytest
from tiny.training import config
from transformers import EvalPrediction

from hf_descent.commands.classify import ModelArguments, accuracy_of, run


@pytest.mark.parametrize(
    "extra", [(), (np.zeros((4, 8, 16)),)], ids=["logits", "with the states of an encoder"]
)
def test_accuracy_is_that_of_the_logits(extra):
    logits = np.eye(3)[[0, 1, 2, 2]]
    predictions = (logits, *extra) if extra else logits
    assert accuracy_of(EvalPrediction(predictions, np.array([0, 1, 2, 0]))) == {"accuracy": 0.75}


@pytest.mark.parametrize(
    "given", [{"prediction_loss_only": True}, {"eval_do_concat_batches": False}]
)
def test_what_leaves_no_accuracy_is_refused(tmp_path, given):
    with pytest.raises(ValueError, match="The accuracy needs the predictions"):
        run(ModelArguments("encoder"), None, config(tmp_path, **given))


def test_a_ut_has_a_readout_of_its_own():
    with pytest.raises(ValueError, match="`unrolled_layers` takes no other `pooling` than 'head'"):
        ModelArguments("encoder", unrolled_layers=2, pooling="mean_linear")
