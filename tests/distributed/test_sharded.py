"""FSDP2 and ZeRO take the steps of one process: parameters are gathered inside the forward, where layers are read."""

import importlib.util

import pytest
from launching import HERE, assert_same, job, launch, run
from safetensors import safe_open
from tiny.files import write_video
from torch.testing import assert_close
from train_steps import train
from transformers import AutoModelForCausalLM, AutoModelForImageToImage

import hf_descent.models  # noqa: F401  (registers the denoisers)


needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed not installed"
)
BACKENDS = {
    "fsdp2": pytest.param("fsdp2", id="fsdp2"),
    "zero2": pytest.param("zero2", marks=needs_deepspeed, id="zero2"),
    "zero3": pytest.param("zero3", marks=needs_deepspeed, id="zero3"),
}
LANGUAGE = {"initial_loss_bound": 4.0, "dual_learning_rate": 0.1}
# Accelerate would make units of BERT's embeddings and of the table inside, which FSDP2 refuses.
WRAPPED = {"FSDP_TRANSFORMER_CLS_TO_WRAP": "BertLayer"}
CASES = {
    "full": ("language", LANGUAGE),
    "lora": ("language", {**LANGUAGE, "lora": True}),
    "checkpointed": ("language", {**LANGUAGE, "gradient_checkpointing": True}),
    "compiled": ("language", {**LANGUAGE, "torch_compile_backend": "aot_eager"}),
    "tied": ("language", {**LANGUAGE, "model": {"tie_word_embeddings": True}}),
    "replayed": ("classification", {"environment": WRAPPED}),
    "held out": ("classification", {"environment": WRAPPED, "rows": 420, "dual_rows": 210}),
    "fine-tuning": ("sft", LANGUAGE),
    "checkpointed fine-tuning": ("sft", {**LANGUAGE, "gradient_checkpointing": True}),
    "adapters": ("sft", {**LANGUAGE, "lora": True}),
    "checkpointed adapters": ("sft", {**LANGUAGE, "lora": True, "gradient_checkpointing": True}),
    "bfloat16": ("sft", {**LANGUAGE, "bf16": True}),
    "checkpointed bfloat16 adapters": (
        "sft", {**LANGUAGE, "bf16": True, "lora": True, "gradient_checkpointing": True},
    ),
}  # fmt: skip
SAVED = {"save_strategy": "steps", "save_steps": 10}
NOISY = {**LANGUAGE, "noise_gamma": 0.5, "learning_rate": 0.5}


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    folder = tmp_path_factory.mktemp("single")
    return {
        name: train(
            folder / name, task, **{k: v for k, v in settings.items() if k != "environment"}
        )
        for name, (task, settings) in CASES.items()
    }


@pytest.fixture(scope="module")
def doubles(tmp_path_factory):
    """The runs of two processes under a backend, made once."""
    runs = {}

    def get(backend):
        if backend not in runs:
            folder = tmp_path_factory.mktemp(backend)
            jobs = {name: job(task, **settings) for name, (task, settings) in CASES.items()}
            jobs["full, accumulated"] = job("language", 2, 2, **LANGUAGE)
            jobs["full, saved"] = job("language", **LANGUAGE, **SAVED)
            jobs["full, resumed"] = job(
                "language", **LANGUAGE, resume_from=f"{folder}/full, saved/checkpoint-10"
            )
            jobs["noisy"] = job("language", **NOISY, **SAVED)
            jobs["noisy, resumed"] = job(
                "language", **NOISY, resume_from=f"{folder}/noisy/checkpoint-10"
            )
            runs[backend] = launch(folder, jobs, backend)
        return runs[backend]

    return get


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CASES, "full, accumulated", "full, resumed"])
@pytest.mark.parametrize("backend", BACKENDS.values())
def test_sharded_processes_take_the_steps_of_one(single, doubles, backend, name):
    double = doubles(backend)[name]
    kind = "FSDP" if backend == "fsdp2" else "DEEPSPEED"
    assert (double[0]["processes"], double[0]["type"], double[0]["left_whole"]) == (2, kind, 0)
    assert_same(single[name.split(",")[0]], double, coarse=100 if "bfloat16" in name else 1)
    assert max(double[0]["multipliers"][0]) > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS.values())
def test_a_sharded_denoiser_is_drawn_by_all_processes_and_saved_whole(tmp_path, backend):
    write_video(tmp_path / "train.avi", 60, 1)
    config = HERE.parent.parent / "recipes" / "smoke" / "video-ut" / "descent.yaml"
    words = ["--train_files", tmp_path / "train.avi", "--split_by", "time", "--split_gap", 0]
    words += ["--max_steps", 2, "--output_dir", tmp_path / "out"]
    done = run(backend, HERE / "command.py", "denoise", "--config", config, *words)
    assert done.returncode == 0, done.stderr[-6000:]
    _, loaded = AutoModelForImageToImage.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(loaded.values()), loaded


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS.values())
def test_sharded_runs_leave_a_whole_model_and_resume_noise_at_its_scale(doubles, backend):
    """Sharded weights are saved without the model's config, and the embeddings are no longer those of the start."""
    result, weights = doubles(backend)["full"]
    assert_close(AutoModelForCausalLM.from_pretrained(result["folder"]).state_dict(), weights)

    with safe_open(
        f"{doubles(backend)['lora'][0]['folder']}/adapter_model.safetensors", "pt"
    ) as adapter:
        assert len(adapter.keys()) > 2

    straight, resumed = (doubles(backend)[name] for name in ("noisy", "noisy, resumed"))

    assert straight[0]["sigma"] == resumed[0]["sigma"] > 0
    assert straight[1]["model.embed_tokens.weight"].float().std() > 1.1 * straight[0]["sigma"]
    assert straight[0]["multipliers"] == resumed[0]["multipliers"]

    assert_same(
        (straight[0] | {name: resumed[0][name] for name in ("losses", "path")}, straight[1]),
        resumed,
    )
