import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny.files import save_generator
from tiny.models import bert, gpt2, llama, spread
from tiny.tokenizers import tokenizer, word_tokenizer
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hf_descent import cli
from hf_descent.commands import exit
from hf_descent.data.alpaca import format_prompt
from hf_descent.early_exit import ConfidenceExit, ConfidenceReport, ExitProfile


def saved(model, folder):
    spread(model).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return str(folder)


def ids_of(row, length=12):
    return [2 + (7 * row + j) % 38 for j in range(length)]


def written_rows(path, count=40, labels=True, length=lambda row: 12):
    """A file of rows whose tokens are `ids_of` each."""
    texts = [" ".join(f"w{token - 2}" for token in ids_of(i, length(i))) for i in range(count)]
    rows = [{"text": text} | ({"label": i % 3} if labels else {}) for i, text in enumerate(texts)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


@pytest.mark.parametrize("adapter", [False, True])
def test_the_exit_command_reports_a_classifier(tmp_path, capsys, adapter):
    spread(bert(num_layers=3)).save_pretrained(tmp_path / "base")
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
    lora = LoraConfig(task_type="SEQ_CLS", init_lora_weights=False, target_modules="all-linear")
    (get_peft_model(base, lora) if adapter else base).save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    data = written_rows(tmp_path / "rows.jsonl")
    words = [f"--{name}_file={data}" for name in ("train", "validation", "test")]
    cli.main(
        [
            "exit",
            str(tmp_path / "model"),
            *words,
            "--repeats=1",
            "--max_seq_length=12",
            "--max_loss=0.1",
        ]
    )
    printed, progress = capsys.readouterr()
    profile = ExitProfile.from_json(str(tmp_path / "model" / "exit_profile.json"))
    report = ConfidenceReport.from_json(str(tmp_path / "model" / "confidence_exit.json"))
    assert str(profile) in printed and str(report) in printed and len(profile.values) == 3
    assert all(
        f" {count}/{count} [" in progress for count in (6, 4)
    )  # three exits, then two ways; each is warmed up
    assert report.full_accuracy == pytest.approx(profile.values[-1], abs=1e-6)
    assert report.accuracy >= report.full_accuracy - 0.1 - 1e-6
    assert profile.headline in printed
    assert ("hf-descent export" in printed) == (profile.shown() is not None)


@pytest.mark.parametrize("given", ["test file", "no test file", "one file"])
def test_the_threshold_is_of_validation_rows_and_the_report_of_others(tmp_path, monkeypatch, given):
    seen, calibrate, evaluate = {}, ConfidenceExit.calibrate, ConfidenceExit.evaluate

    def rows_of(rows):
        return {(tuple(row["input_ids"]), row["labels"]) for row in rows}

    def calibrating(self, rows, max_loss=0.01, **settings):
        seen["max_loss"], seen["validation"] = max_loss, rows_of(rows)
        return calibrate(self, rows, max_loss, **settings)

    def evaluating(self, rows, **settings):
        seen["report"] = rows_of(rows)
        return evaluate(self, rows, **settings)

    def profiling(model, rows, **settings):
        seen["profile"] = rows_of(rows)
        return profile(model, rows, **settings)

    profile = exit.exit_profile
    monkeypatch.setattr(exit, "exit_profile", profiling)
    monkeypatch.setattr(ConfidenceExit, "calibrate", calibrating)
    monkeypatch.setattr(ConfidenceExit, "evaluate", evaluating)
    model = bert(num_layers=2)
    model.config.id2label = {0: "2", 1: "1", 2: "0"}
    folder = saved(model, tmp_path / "model")
    lines = Path(written_rows(tmp_path / "train.jsonl", 38)).read_text().splitlines()
    (tmp_path / "validation.jsonl").write_text("\n".join(lines[:20]))
    (tmp_path / "test.jsonl").write_text("\n".join(lines[20:]))
    names = ["train", "validation", *(["test"] if given == "test file" else [])]
    words = [word for name in names for word in (f"--{name}_file", str(tmp_path / f"{name}.jsonl"))]
    if given == "one file":
        words = ["--data", str(tmp_path / "validation.jsonl")]
    cli.main(
        ["exit", folder, *words, "--max_loss", "0.3", "--max_seq_length", "12", "--repeats", "1"]
    )
    rows = [(tuple(ids_of(i)), 2 - i % 3) for i in range(38)]
    assert seen["max_loss"] == 0.3 and seen["report"] == seen["profile"]
    assert seen["validation"] | seen["report"] == set(rows if given == "test file" else rows[:20])
    assert (
        len(seen["validation"]) == (20 if given == "test file" else 10)
        and not seen["validation"] & seen["report"]
    )


def test_the_exit_command_reports_a_language_model(tmp_path, capsys):
    folder = saved(llama(num_layers=3), tmp_path / "model")
    data = written_rows(
        tmp_path / "texts.jsonl", 6, labels=False, length=lambda row: 12 - row
    )  # which are padded
    words = ["--data", data, "--repeats", "1", "--output_dir", str(tmp_path / "out")]
    cli.main(["exit", folder, *words])
    printed, progress = capsys.readouterr()
    assert "Timing: 100%" in progress
    profile = ExitProfile.from_json(str(tmp_path / "out" / "exit_profile.json"))
    assert str(profile) in printed and len(profile.values) == 3
    model, losses = AutoModelForCausalLM.from_pretrained(folder), []
    for i in range(6):
        ids = torch.tensor([ids_of(i, 12 - i)])
        losses += (11 - i) * [model(ids, labels=ids).loss.item()]
    assert profile.losses[-1] == pytest.approx(sum(losses) / len(losses), rel=1e-4)
    with pytest.raises(ValueError, match="give a file of texts or instructions by `--data`"):
        cli.main(["exit", folder])
    (tmp_path / "texts.json").write_text('{"text": null}')
    with pytest.raises(ValueError, match=r"texts\.json has 1 examples whose text is not a string"):
        cli.main(["exit", folder, "--data", str(tmp_path / "texts.json")])


def seen_by_the_profile(monkeypatch, *words):
    """Token ids and labels of the rows that are measured."""
    seen = []

    def exits(model, rows, **given):
        seen.extend((row["input_ids"], row["labels"]) for row in rows)
        return ExitProfile("accuracy", [0.5], [1.0], [1.0], 1)

    monkeypatch.setattr(exit, "exit_profile", exits)
    cli.main(["exit", *map(str, words)])
    return seen


def test_the_rows_of_a_text_file_are_measured(tmp_path, monkeypatch):
    data = written_rows(tmp_path / "texts.jsonl", 6, labels=False)
    ids = [ids_of(row) for row in range(6)]
    folder = saved(llama(num_layers=2), tmp_path / "model")
    words = [folder, "--data", data, "--max_eval_samples", "5"]
    assert seen_by_the_profile(monkeypatch, *words) == [(row, row) for row in ids[:5]]
    cut = seen_by_the_profile(monkeypatch, *words, "--max_seq_length", "9")
    assert cut == [(row[:9], row[:9]) for row in ids[:5]]


def test_rows_that_are_left_out_are_counted(tmp_path, monkeypatch, capsys):
    folder = saved(llama(num_layers=2), tmp_path / "model")
    texts = written_rows(tmp_path / "texts.jsonl", 6, labels=False, length=lambda row: 4 - row // 2)
    words = [folder, "--data", texts, "--max_seq_length"]
    assert len(seen_by_the_profile(monkeypatch, *words, "9")) == 6
    texts = written_rows(tmp_path / "texts.jsonl", 6, labels=False, length=lambda row: 3 - row // 2)
    assert len(seen_by_the_profile(monkeypatch, *words, "9")) == 4  # of 3 and 2 tokens
    assert "Dropped 2 of the 6 examples: they have fewer than 2 tokens." in capsys.readouterr().out
    with pytest.raises(ValueError, match="No text, cut to 1 tokens, has more than one token"):
        seen_by_the_profile(monkeypatch, *words, "1")

    rows = [{"instruction": f"w{i}", "output": "w1" if i else ""} for i in range(3)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    seen_by_the_profile(monkeypatch, folder, "--data", tmp_path / "rows.json")
    assert "Dropped 1 of the 3 examples: they have no `output`." in capsys.readouterr().out


@pytest.mark.parametrize("answered", [True, False])
@pytest.mark.parametrize(("chat", "form"), [(True, "auto"), (True, "alpaca"), (False, "auto")])
def test_instructions_are_asked_as_in_training_and_their_answers_measured(
    tmp_path, monkeypatch, answered, chat, form
):
    folder, tok = save_generator(tmp_path / "model", chat), tokenizer(chat)
    rows = [{"instruction": f"Add {i}.", "input": "1" * (i % 2)} for i in range(4)]
    rows = [row | ({"output": f"It is {i}"} if answered else {}) for i, row in enumerate(rows)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    flags = ["--data", tmp_path / "rows.json", "--prompt_format", form]
    seen = seen_by_the_profile(monkeypatch, folder, *flags, "--output_dir", tmp_path / "out")
    as_chat, asked, texts = chat and form == "auto", [], []
    for i, row in enumerate(rows):
        text = f"<user>Add {i}.{chr(10) * 2 + '1' if i % 2 else ''}</s><assistant>"
        asked.append(text if as_chat else format_prompt(row["instruction"], row["input"]))
        texts.append(asked[-1] + (f"It is {i}</s>" if answered else ""))
    assert tok.batch_decode([ids for ids, _ in seen]) == texts
    for text, prompt, (_, labels) in zip(texts, asked, seen):
        own = [label for label in labels if label >= 0]
        assert tok.decode(own) == (text.removeprefix(prompt) if answered else text)


def test_the_answers_to_instructions_are_measured(tmp_path):
    folder = save_generator(tmp_path / "model")
    rows = [{"instruction": f"Add {i}.", "output": "It is."} for i in range(3)]
    (tmp_path / "rows.json").write_text(
        json.dumps([*rows, {"instruction": "Add 4.", "output": ""}])
    )  # no answer
    cli.main(["exit", folder, "--data", str(tmp_path / "rows.json"), "--repeats", "1"])
    model, losses = AutoModelForCausalLM.from_pretrained(folder), []
    for row in rows:
        prompt = tokenizer(False)(format_prompt(row["instruction"]))["input_ids"]
        ids = torch.tensor([[*prompt, *tokenizer(False)("It is.</s>")["input_ids"]]])
        labels = ids.masked_fill(torch.arange(ids.shape[1]) < len(prompt), -100)
        losses.append(model(ids, labels=labels).loss.item())  # over 7 tokens each
    profile = ExitProfile.from_json(f"{folder}/exit_profile.json")
    assert profile.losses[-1] == pytest.approx(sum(losses) / 3, rel=1e-4)


def test_texts_are_cut_to_the_positions_of_the_model(tmp_path):
    model = gpt2(num_layers=2, n_positions=9)
    folder = saved(model, tmp_path / "model")
    data = written_rows(tmp_path / "texts.jsonl", 6, labels=False)  # of 12 tokens
    cli.main(["exit", folder, "--data", data, "--output_dir", str(tmp_path / "out")])
    profile = ExitProfile.from_json(str(tmp_path / "out" / "exit_profile.json"))
    ids = torch.tensor([ids_of(row, 9) for row in range(6)])
    assert profile.losses[-1] == pytest.approx(model(ids, labels=ids).loss.item(), rel=1e-4)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"exit_profile.json"}
