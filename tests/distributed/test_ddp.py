"""One process with batch 8, two with batch 4, and two with batch 2 twice accumulated take the same steps under DDP."""

import numpy as np
import pytest
import torch
from launching import assert_same, job, launch, start
from tiny.models import llama
from train_steps import recorded_noise, train

from hf_descent.losses.layerwise import TiledLosses
from hf_descent.noise.embedding_noise import EmbeddingNoise


LANGUAGE = {"initial_loss_bound": 4.0, "dual_learning_rate": 0.1}
AUTO = {
    "descent_alpha": "auto",
    "initial_loss_bound": "auto",
    "loss_targets": {1: 0.5},
    "dual_warmup_steps": 12,
}
SAVED = {"save_strategy": "steps", "save_steps": 10}
CASES = {
    "classification": ("classification", {}),
    "classification, plain training": ("classification", {"objective": "erm"}),
    "evaluated before training": ("classification", {"evaluate_first": True}), "language": ("language", LANGUAGE),
    "auto": ("language", dict(AUTO, **SAVED)), "image": ("image", {"ddp_find_unused_parameters": False}),
    "image, unused parameters looked for": ("image", {"ddp_find_unused_parameters": True}),
    "image, plain training": ("image", {"objective": "erm"}), "readout": ("readout", {}),
    "checkpointed readout": ("readout", {"gradient_checkpointing": True}),
    "own loss": ("own loss", LANGUAGE), "own loss, plain training": ("own loss", {"objective": "erm"}),
    "fine-tuning": ("sft", dict(LANGUAGE, **SAVED)), "strung together": ("sft", {**LANGUAGE, "padding_free": True}),
    "adapters": ("sft", {**LANGUAGE, "lora": True}),
    "checkpointed adapters": ("sft", {**LANGUAGE, "lora": True, "gradient_checkpointing": True}),
    "bfloat16": ("sft", {**LANGUAGE, "bf16": True}),
}  # fmt: skip
NOISY = {**LANGUAGE, "noise_gamma": 0.5, "record_noise": True, "max_steps": 4, "seed": 7}
NOISY["per_device_eval_batch_size"] = (
    12  # of 80 rows: two processes that share them would read some twice
)
SCORED = {**LANGUAGE, "max_steps": 2}
SAMPLED = {**LANGUAGE, "readout_token_fraction": 0.4}
POISONED = {"poison": ["state", 3], "max_steps": 6}


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    folder = tmp_path_factory.mktemp("single")
    return folder, {
        name: train(folder / name, task, **settings) for name, (task, settings) in CASES.items()
    }


@pytest.fixture(scope="module")
def double(tmp_path_factory, single):
    jobs = {f"{name}, 2x4": job(task, **settings) for name, (task, settings) in CASES.items()}
    jobs.update(
        {f"{name}, 2x2x2": job(task, 2, 2, **settings) for name, (task, settings) in CASES.items()}
    )

    for name in ("auto", "fine-tuning"):
        task, settings = CASES[name]
        jobs[f"{name}, resumed"] = job(
            task, **settings, resume_from=str(single[0] / name / "checkpoint-10")
        )

    jobs.update(
        {"noise": job("language", 2, 2, **NOISY), "noise again": job("language", 2, 2, **NOISY)}
    )
    jobs.update(scored=job("sft", **SCORED, per_device_eval_batch_size=4))
    jobs.update(
        {
            "sampled, 2x4": job("language", **SAMPLED),
            "sampled, 2x2x2": job("language", 2, 2, **SAMPLED),
        }
    )
    jobs.update(poisoned=job("classification", **POISONED))
    folder = tmp_path_factory.mktemp("double")
    return folder, launch(folder, jobs)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("way", ["2x4", "2x2x2"])
def test_the_number_of_processes_does_not_matter(single, double, name, way):
    single = single[1][name]
    double = double[1][f"{name}, {way}"]
    assert (single[0]["processes"], double[0]["processes"]) == (1, 2)
    assert double[0]["type"] == "MULTI_CPU"
    assert_same(single, double, coarse=100 if name == "bfloat16" else 1)
    assert max(single[0]["multipliers"][0]) > 0.01 or "plain" in name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["auto", "fine-tuning"])
def test_another_number_of_processes_resumes(tmp_path, single, double, name):
    """Also within the warm-up of "auto"."""
    (_, straight) = single
    (folder, runs) = double
    (task, settings) = CASES[name]
    checkpoint = str(folder / f"{name}, 2x4" / "checkpoint-10")
    for resumed in (
        train(tmp_path, task, **settings, resume_from=checkpoint),
        runs[f"{name}, resumed"],
    ):
        assert_same(straight[name], resumed)


@pytest.mark.slow
def test_metrics_are_those_of_one_process(tmp_path, single, double):
    def metrics(name):
        return single[1][name][0]["metrics"], double[1][f"{name}, 2x4"][0]["metrics"]

    for name in ("classification, plain training", "image, plain training", "classification"):
        expected, found = metrics(name)
        # Of plain training it is a mean over batches, in which the row that fills the last one counts.
        assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=2e-2)

    # Rows that fill the last batch count in no other metric, nor in a prediction of padding-free rows.
    expected, found = metrics("strung together")

    assert expected["test_loss"] == pytest.approx(expected["eval_loss"], rel=1e-6)

    for name in ("test_loss", "test_layer_loss_1", "eval_loss"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5)

    expected = train(tmp_path, "sft", **SCORED, per_device_eval_batch_size=8)[0]["metrics"]

    for name in ("eval_mean_token_accuracy", "eval_entropy"):
        assert double[1]["scored"][0]["metrics"][name] == pytest.approx(expected[name], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "batch"), [("2x4", 4), ("2x2x2", 2)])
def test_sampled_tokens_count_as_in_one_process(tmp_path, monkeypatch, single, double, way, batch):
    """That is, one which has the batches of both as micro-batches, and draws for each what that process draws."""
    drawn = []

    def draw(self, key):
        count = 8 // batch
        step, part = divmod(len(drawn), count)
        drawn.append(np.random.SeedSequence(self._seed, spawn_key=(part % 2, step, part // 2, 1)))
        return torch.Generator().manual_seed(int(drawn[-1].generate_state(1, np.uint64)[0]))

    monkeypatch.setattr(TiledLosses, "_generator", draw)
    alone = train(tmp_path, "language", batch, 8 // batch, **SAMPLED)

    assert len(drawn) == 20 * 8 // batch

    assert_same(alone, double[1][f"sampled, {way}"])

    with pytest.raises(AssertionError):  # so other draws would show
        assert_same(alone, single[1]["language"])


@pytest.mark.slow
def test_noise_is_reproducible_and_independent_across_processes(tmp_path, double):
    first, again = (double[1][name][0] for name in ("noise", "noise again"))

    assert first["sigma"] == train(tmp_path, "language", 4, 2, **NOISY)[0]["sigma"]
    assert first["noise"] == again["noise"] and first["losses"] == again["losses"]

    draws = np.array(first["noise"])  # [processes, micro-steps, batch, seq, hidden]

    assert draws.shape[:3] == (2, 4 * 2, 2)
    assert draws.std() == pytest.approx(0.5 * first["sigma"], rel=0.05)

    correlations = np.corrcoef(draws.reshape(2 * 8, -1)) - np.eye(16)

    assert np.abs(correlations).max() < 5 / np.sqrt(draws[0, 0].size)

    # What a run with this seed draws for a process, a step and a micro-step, however it came there.
    model = llama()
    drawn = recorded_noise(model)

    with EmbeddingNoise(model, 0.5, seed=7, sigma=first["sigma"]) as noise:
        for process, step, micro_step in ((0, 0, 0), (1, 3, 1)):
            noise.reseed(process, step, micro_step)
            model(torch.zeros(2, 12, dtype=torch.long))
            assert drawn[-1].numpy() == pytest.approx(
                draws[process, 2 * step + micro_step], abs=1e-6
            )


@pytest.mark.slow
def test_one_process_that_is_not_finite_moves_no_multiplier_on_any(double):
    run = double[1]["poisoned"][0]
    assert run["steps"] == [6, 6] and run["dual_steps"] == 3
    assert run["multipliers"][0] == run["multipliers"][1] and np.isfinite(run["multipliers"]).all()


@pytest.mark.slow
def test_processes_share_the_held_out_rows(tmp_path):
    settings = {"rows": 420, "dual_rows": 210, "dual_learning_rate": 0.1}
    single = train(tmp_path / "single", "classification", **settings)
    jobs = {
        "2x4": job("classification", **settings),
        "2x2x2": job("classification", 2, 2, **settings),
    }
    jobs["split"] = job("classification", 8, accelerator_config={"split_batches": True}, **settings)
    for double in launch(tmp_path, jobs).values():
        assert_same(single, double)
        assert double[0]["dual_steps"] == 24 and max(double[0]["multipliers"][0]) > 0.01


@pytest.mark.slow
def test_multipliers_that_differ_between_processes_are_not_saved(tmp_path):
    run = start(
        tmp_path, {"job": job("classification", poison=["multiplier", 2], **SAVED, max_steps=10)}
    )
    assert (
        run.returncode
        and run.stderr.count("RuntimeError: The multipliers differ between processes") == 2
    )
    assert not list(tmp_path.glob("**/descent_state.safetensors"))
