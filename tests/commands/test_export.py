import argparse
import json
import shlex
from importlib import import_module

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tiny.models import bert, llama, spread
from tiny.tokenizers import tokenizer, word_tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BartConfig,
    BartForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    MambaConfig,
    MambaForCausalLM,
)

from hf_descent import cli, layer_logits
from hf_descent.models import LinearReadoutForSequenceClassification


@pytest.fixture
def language_model(tmp_path):
    tok = tokenizer(chat=True)
    model = spread(llama(num_layers=4, vocab_size=len(tok)))
    model.generation_config.repetition_penalty = 1.5
    model.save_pretrained(tmp_path / "whole")
    tok.save_pretrained(tmp_path / "whole")
    return tmp_path / "whole"


def export(model, layer, folder, *flags):
    cli.main(["export", str(model), "--layer", str(layer), "--output_dir", str(folder), *flags])


def test_the_checkpoint_has_the_bytes_of_the_first_layers_and_all_that_goes_with_them(
    language_model, tmp_path
):
    export(language_model, 2, tmp_path / "short")
    given, written = (
        load_file(path / "model.safetensors") for path in (language_model, tmp_path / "short")
    )
    assert written.keys() == {
        name for name in given if not name.startswith(("model.layers.2.", "model.layers.3."))
    }
    assert all(torch.equal(tensor, given[name]) for name, tensor in written.items())
    config = json.loads((tmp_path / "short" / "config.json").read_text())
    assert (config["architectures"], config["num_hidden_layers"]) == (["LlamaForCausalLM"], 2)
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "short" / name).read_text() == (language_model / name).read_text(), name
    message = [{"role": "user", "content": "hello"}]
    ids = AutoTokenizer.from_pretrained(tmp_path / "short").apply_chat_template(
        message, return_dict=False
    )
    assert ids == tokenizer(chat=True).apply_chat_template(message, return_dict=False)


def test_as_an_assistant_it_leaves_the_text_as_it_is(language_model, tmp_path):
    export(language_model, 3, tmp_path / "short")
    whole, short = (
        AutoModelForCausalLM.from_pretrained(path) for path in (language_model, tmp_path / "short")
    )
    for seed in range(3):
        ids = torch.randint(7, 200, (1, 6), generator=torch.Generator().manual_seed(seed))
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 20, "do_sample": False}
        plain = whole.generate(ids, **options)
        assert torch.equal(whole.generate(ids, assistant_model=short, **options), plain)


def commands_of(printed):
    """The printed commands that serve a model with the exported one as its draft, as lists of words."""
    lines = printed.replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if line.startswith(("  vllm", "  python"))]


def test_the_printed_commands_are_whole(language_model, tmp_path, capsys):
    short = tmp_path / "short"
    export(language_model, 2, short)
    printed = capsys.readouterr().out
    drafting = commands_of(printed)
    vllm = next(words for words in drafting if "--speculative-config" in words)
    speculation = json.loads(vllm[-1])
    assert vllm[:3] == ["vllm", "serve", str(language_model)]
    assert speculation == {
        "method": "draft_model",
        "model": str(short),
        "num_speculative_tokens": 4,
    }
    sglang = next(words for words in drafting if "STANDALONE" in words)
    options = dict(zip(sglang[3::2], sglang[4::2], strict=True))
    assert options["--model-path"] == str(language_model) and options[
        "--speculative-draft-model-path"
    ] == str(short)
    assert any(
        "--spec-type draft-simple -md draft.gguf --spec-draft-n-max 4" in " ".join(words)
        for words in drafting
    )
    assert f'assistant_model=AutoModelForCausalLM.from_pretrained("{short}")' in printed
    assert "The first 2 of 4 layers" in printed


def test_vllm_takes_the_printed_command(language_model, tmp_path, capsys, monkeypatch):
    """Where it is installed: version 0.33.0 without a device, but with what its parser imports."""
    platforms = pytest.importorskip("vllm.platforms")
    monkeypatch.setattr(
        platforms, "_current_platform", import_module("vllm.platforms.cpu").CpuPlatform()
    )
    monkeypatch.setattr(platforms, "current_platform", platforms._current_platform, raising=False)
    parser = import_module("vllm.utils.argparse_utils").FlexibleArgumentParser()
    export(language_model, 2, tmp_path / "short")
    words = next(
        words for words in commands_of(capsys.readouterr().out) if "--speculative-config" in words
    )
    found = (
        import_module("vllm.entrypoints.common.cli_args")
        .make_arg_parser(parser)
        .parse_args(words[2:])
    )
    assert found.model_tag == str(language_model) and found.speculative_config["model"] == str(
        tmp_path / "short"
    )
    fields = import_module("vllm.config").SpeculativeConfig.__dataclass_fields__
    assert found.speculative_config.keys() <= fields.keys()


def test_sglang_takes_the_printed_command(language_model, tmp_path, capsys):
    """Where it is installed: version 0.5.23 without a device, but with what its parser imports."""
    parser = argparse.ArgumentParser()
    pytest.importorskip("sglang.srt.server_args").ServerArgs.add_cli_args(parser)
    export(language_model, 2, tmp_path / "short")
    words = next(words for words in commands_of(capsys.readouterr().out) if "STANDALONE" in words)
    found = parser.parse_args(words[3:])
    assert found.model_path == str(language_model)
    assert found.speculative_draft_model_path == str(tmp_path / "short")


def test_an_adapter_is_merged_and_the_whole_of_it_can_be_written(language_model, tmp_path, capsys):
    base = AutoModelForCausalLM.from_pretrained(language_model)
    lora = LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, target_modules="all-linear")
    adapted = get_peft_model(base, lora).eval()
    adapted.save_pretrained(tmp_path / "run")
    AutoTokenizer.from_pretrained(language_model).save_pretrained(tmp_path / "run")
    ids = torch.arange(8, 16)[None]
    with torch.no_grad():
        truth = layer_logits(adapted, {"input_ids": ids})
        for layer in (2, 4):
            export(tmp_path / "run", layer, tmp_path / str(layer))
            short = AutoModelForCausalLM.from_pretrained(tmp_path / str(layer))
            torch.testing.assert_close(
                short(ids).logits, truth[layer - 1], rtol=1e-3, atol=1e-3
            )  # merging rounds
            printed = capsys.readouterr().out
            assert ("vllm serve WHOLE " in printed and "--layer 4` writes" in printed) == (
                layer == 2
            )


def test_a_classifier_is_cut_and_drafts_nothing(tmp_path, capsys):
    spread(bert(num_layers=3)).save_pretrained(tmp_path / "whole")
    word_tokenizer().save_pretrained(tmp_path / "whole")
    export(tmp_path / "whole", 2, tmp_path / "short")
    short = AutoModelForSequenceClassification.from_pretrained(tmp_path / "short")
    assert len(short.bert.encoder.layer) == 2
    printed = capsys.readouterr().out
    assert (
        "AutoModelForSequenceClassification.from_pretrained" in printed and "serve" not in printed
    )
    linear = LinearReadoutForSequenceClassification.from_encoder(tmp_path / "whole", "mean")
    sizes = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 3, "max_position_embeddings": 32}
    bart = BartForSequenceClassification(
        BartConfig(vocab_size=99, num_labels=3, eos_token_id=1, **sizes)
    )
    for kind, model in (
        ("linear", linear),
        ("bart", bart),
    ):  # which needs an eos, here the unknown word
        model.save_pretrained(tmp_path / kind)
        word_tokenizer().save_pretrained(tmp_path / kind)
        export(tmp_path / kind, 2, tmp_path / f"{kind}-short")
        assert ("import hf_descent.models; Auto" in capsys.readouterr().out) == (kind == "linear")


def test_what_cannot_be_written_is_refused(language_model, tmp_path):
    with pytest.raises(ValueError, match="`output_dir` .* is not empty; name another"):
        export(language_model, 2, language_model)
    with pytest.raises(ValueError, match="`num_layers` is 5; LlamaForCausalLM has layers 1 to 4"):
        export(language_model, 5, tmp_path / "short")
    assert not (tmp_path / "short").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["language model", "classifier", "linear readout", "bfloat16"])
def test_onnx_runtime_gives_the_logits_of_the_first_layers(kind, language_model, tmp_path, capsys):
    onnxruntime, folder = pytest.importorskip("onnxruntime"), language_model
    if kind == "bfloat16":  # as a run may save it, for which ONNX Runtime has too few operations
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    elif kind != "language model":
        folder, classifier = tmp_path / "classifier", spread(bert(4))
        if kind == "linear readout":
            classifier.bert.save_pretrained(tmp_path / "encoder")
            classifier = LinearReadoutForSequenceClassification.from_encoder(
                tmp_path / "encoder", "mean"
            )
        classifier.save_pretrained(folder)
        word_tokenizer().save_pretrained(folder)
    export(folder, 2, tmp_path / "onnx", "--format", "onnx")
    assert "onnxruntime.InferenceSession" in capsys.readouterr().out
    session = onnxruntime.InferenceSession(tmp_path / "onnx" / "model.onnx")
    inputs = AutoTokenizer.from_pretrained(tmp_path / "onnx")(
        ["w1 w2 w3 w4 w5", "w5", "w2 w2"], padding=True
    )
    named = {given.name: np.array(inputs[given.name]) for given in session.get_inputs()}
    logits = session.run(["logits"], named)[0]
    auto_class = (
        AutoModelForSequenceClassification if folder.name == "classifier" else AutoModelForCausalLM
    )
    with torch.no_grad():
        whole = auto_class.from_pretrained(folder, dtype=torch.float32)
        expected = layer_logits(whole, {name: torch.tensor(rows) for name, rows in named.items()})[
            1
        ]
    assert logits.shape == expected.shape and np.abs(logits - expected.numpy()).max() < 1e-4


@pytest.mark.slow
def test_a_graph_for_texts_of_one_length_is_refused(tmp_path):
    tok = tokenizer(chat=True)
    MambaForCausalLM(
        MambaConfig(vocab_size=len(tok), hidden_size=16, num_hidden_layers=2)
    ).save_pretrained(tmp_path)
    tok.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="MambaForCausalLM has a graph for texts of one length"):
        export(tmp_path, 1, tmp_path / "onnx", "--format", "onnx")
    assert not (tmp_path / "onnx").exists()


def test_an_adapter_is_no_start_of_a_training_but_what_is_made_of_it_is(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"task_type": "SEQ_CLS"}')
    argv = [
        "classify",
        "--model_name_or_path",
        str(tmp_path),
        "--output_dir",
        str(tmp_path / "out"),
    ]
    with pytest.raises(
        ValueError, match=f"`model_name_or_path` '{tmp_path}' is an adapter: start from what"
    ):
        cli.main(argv)


def test_layers_are_written_without_a_tokenizer_where_nothing_needs_one(tmp_path, capsys):
    spread(bert(num_layers=3)).save_pretrained(tmp_path / "whole")
    export(tmp_path / "whole", 2, tmp_path / "short")

    short = AutoModelForSequenceClassification.from_pretrained(tmp_path / "short")
    assert len(short.bert.encoder.layer) == 2
    printed = capsys.readouterr().out
    assert f"No tokenizer in '{tmp_path / 'whole'}': save it there" in printed
    assert "one of:" not in printed  # the first line of a list of reasons
    assert "hf-descent show" not in printed  # it needs the tokenizer

    needs_padding = LlamaForSequenceClassification(
        LlamaConfig(vocab_size=99, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
    )
    needs_padding.save_pretrained(tmp_path / "llama")
    with pytest.raises(ValueError, match=r"No tokenizer in (.|\n)*in Python: `truncate\(model"):
        export(tmp_path / "llama", 1, tmp_path / "llama-short")
