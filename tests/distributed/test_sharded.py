"""FSDP2 and ZeRO take the steps of one process: parameters are gathered inside the forward, where layers are read."""

import importlib.util

import pytest
from launching import assert_same, launch


needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed not installed")
BACKENDS = {
    "fsdp2": pytest.param("fsdp2", "FSDP"),
    "zero2": pytest.param("zero2", "DEEPSPEED", marks=needs_deepspeed),
    "zero3": pytest.param("zero3", "DEEPSPEED", marks=needs_deepspeed),
}
LANGUAGE = {"initial_loss_bound": 4.0, "dual_learning_rate": 0.1}
CASES = {
    "full": ("language", LANGUAGE),
    "lora": ("language", {**LANGUAGE, "lora": True}),
    "checkpointed": ("language", {**LANGUAGE, "gradient_checkpointing": True}),
    "tied": ("language", {**LANGUAGE, "tie_word_embeddings": True}),
    # Accelerate would make units of BERT's embeddings and of the table inside, which FSDP2 refuses.
    "replayed": ("classification", {"environment": {"FSDP_TRANSFORMER_CLS_TO_WRAP": "BertLayer"}}),
}


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """The run of one process for each case, made once."""
    runs = {}

    def run(case):
        if case not in runs:
            task, settings = CASES[case]
            runs[case] = launch(tmp_path_factory.mktemp(case), task, 8, 1, 1, **settings)
        return runs[case]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("backend", "kind"), BACKENDS.values(), ids=BACKENDS)
def test_sharded_processes_take_the_steps_of_one(tmp_path, single, backend, kind, case):
    task, settings = CASES[case]
    for batch, accumulation in ((4, 1), (2, 2)) if case == "full" else ((4, 1),):
        double = launch(tmp_path / f"{batch}", task, batch, accumulation, 2, backend, **settings)
        assert (double[0]["processes"], double[0]["type"]) == (2, kind)
        assert_same(single(case), double)
    assert max(double[0]["multipliers"][0]) > 0.01
