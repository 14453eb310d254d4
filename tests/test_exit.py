import json

import pytest
import torch
from tiny import bert, llama, spread, word_tokenizer
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hf_descent import cli
from hf_descent.early_exit import ConfidenceReport, ExitProfile, SpeculationProfile


def written_rows(path, count=40, labels=True):
    rows = [
        {"text": " ".join(f"w{(7 * i + j) % 38}" for j in range(12))} | ({"label": i % 3} if labels else {})
        for i in range(count)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_the_exit_command_reports_a_classifier_and_saves_the_cut_model(tmp_path, capsys):
    spread(bert(num_layers=3)).save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    data = written_rows(tmp_path / "rows.jsonl")
    cli.main(
        [
            "exit",
            str(tmp_path / "model"),
            "--train_file",
            data,
            "--validation_file",
            data,
            "--test_file",
            data,
            "--save_layer",
            "2",
            "--repeats",
            "1",
            "--max_seq_length",
            "12",
            "--max_loss",
            "0.1",
        ]
    )
    printed = capsys.readouterr().out
    profile = ExitProfile.from_json(str(tmp_path / "model" / "exit_profile.json"))
    report = ConfidenceReport.from_json(str(tmp_path / "model" / "confidence_exit.json"))
    assert str(profile) in printed and str(report) in printed and len(profile.values) == 3
    assert report.full_accuracy == pytest.approx(profile.values[-1], abs=1e-6)
    assert report.accuracy >= report.full_accuracy - 0.1 - 1e-6
    assert (tmp_path / "model" / "exits.png").stat().st_size > 1000
    assert (
        len(AutoModelForSequenceClassification.from_pretrained(tmp_path / "model" / "layer-2").bert.encoder.layer) == 2
    )


def test_the_exit_command_reports_a_language_model(tmp_path, capsys):
    spread(llama(num_layers=3)).save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    data = written_rows(tmp_path / "texts.jsonl", 6, labels=False)
    cli.main(
        [
            "exit",
            str(tmp_path / "model"),
            "--text_file",
            data,
            "--prompts",
            "2",
            "--prompt_length",
            "4",
            "--max_new_tokens",
            "6",
            "--repeats",
            "1",
            "--output_dir",
            str(tmp_path / "out"),
        ]
    )
    assert "best: assistant_early_exit=" in capsys.readouterr().out
    profile = ExitProfile.from_json(str(tmp_path / "out" / "exit_profile.json"))
    speculation = SpeculationProfile.from_json(str(tmp_path / "out" / "speculation_profile.json"))
    assert len(speculation.acceptance) == 2 and len(profile.values) == 3
    ids = torch.tensor([[2 + (7 * i + j) % 38 for j in range(12)] for i in range(6)])
    loss = AutoModelForCausalLM.from_pretrained(tmp_path / "model")(ids, labels=ids).loss
    assert profile.losses[-1] == pytest.approx(loss.item(), rel=1e-4)
    with pytest.raises(ValueError, match="`prompt_length` = 40"):
        cli.main(["exit", str(tmp_path / "model"), "--text_file", data, "--prompt_length", "40"])
    with pytest.raises(ValueError, match="`text_file` is None"):
        cli.main(["exit", str(tmp_path / "model")])
