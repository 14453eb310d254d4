from pathlib import Path

import evaluate
import pytest
from tiny import bert, classification_data
from transformers import default_data_collator

from hf_descent import EmbeddingNoise, noise_curve
from hf_descent.metrics.noise_auc import noise_auc
from hf_descent.metrics.noise_auc.noise_auc import NoiseAuc


def test_area_by_hand():
    metric = NoiseAuc(keep_in_memory=True)
    metric.add_batch(predictions=[1, 1, 0], references=[1, 1, 1], gammas=[0.5, 1.0, 1.0])  # accuracies 1 and 1/2
    metric.add_batch(predictions=[2, 2], references=[0, 1], gammas=[2.5, 2.5])  # 0
    result = metric.compute()
    assert result == {"noise_auc": 0.5 * 0.75 + 1.5 * 0.25, "noise_auc_over_range": 0.375}
    assert type(result["noise_auc"]) is float
    with pytest.raises(ValueError, match="at least two"):
        NoiseAuc(keep_in_memory=True).compute(predictions=[1], references=[1], gammas=[0.5])


def test_it_is_the_area_of_the_noise_curve():
    model, data, metric = bert().eval(), classification_data(24), NoiseAuc(keep_in_memory=True)
    curve = noise_curve(model, data, [0.0, 1.0, 3.0], draws=1, batch_size=24)
    batch = default_data_collator(data)
    for gamma in curve.gammas:
        noise = EmbeddingNoise(model, gamma, seed=0)
        noise.reseed(0, round(gamma * 1e6), 0)
        with noise:
            predictions = model(**batch).logits.argmax(-1)
        metric.add_batch(predictions=predictions, references=batch["labels"], gammas=[gamma] * 24)
    assert metric.compute()["noise_auc"] == pytest.approx(curve.auc)


def test_evaluate_loads_it_from_its_folder_without_a_download(evaluate_modules):
    metric = evaluate.load(str(Path(noise_auc.__file__).parent), keep_in_memory=True)
    assert metric.compute(predictions=[1, 0], references=[1, 1], gammas=[0.0, 1.0])["noise_auc"] == 0.5
