"""The benchmark of sets of layers: what it measures, and that kept states change nothing."""

import json

import layer_sets
import pytest
import torch
from datasets import Dataset
from tiny.models import llama, spread
from tiny.tokenizers import tokenizer
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from hf_descent.early_exit import keep_layers


def test_gaps_begin_where_numbers_are_missing():
    assert layer_sets.gap_of([1, 2, 5]) == 2
    assert layer_sets.gap_of([*range(1, 13), *range(19, 31)]) == 12
    assert layer_sets.gap_of([1, 2]) == 2


@pytest.fixture
def words(tmp_path):
    """The options of a run with a tiny model."""
    text = tokenizer()
    model = spread(llama(num_layers=4, vocab_size=len(text), max_position_embeddings=128))
    model.save_pretrained(tmp_path / "model")
    text.save_pretrained(tmp_path / "model")
    for name, count in (("train", 20), ("test", 10)):
        rows = [
            {"instruction": f"{name} {number}", "input": "", "output": "yes " * (1 + number % 3)}
            for number in range(count)
        ]
        Dataset.from_list(rows).to_parquet(tmp_path / f"{name}.parquet")
    options = {
        "model": tmp_path / "model",
        "alpaca": tmp_path,
        "layers": "1-2,4",
        "states": tmp_path / "states.pt",
        "output": tmp_path / "runs.jsonl",
        "steps": 6,
        "rows": 16,
        "rate": 1e-2,
    }
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def test_a_run_measures_the_set_before_and_after_healing(words, tmp_path):
    layer_sets.main(words)
    (run,) = map(json.loads, (tmp_path / "runs.jsonl").read_text().splitlines())
    assert run["settings"]["layers"] == "1-2,4"
    assert run["whole"]["ratio"] == run["whole"]["agreement"] == 1.0

    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    text = tokenizer()
    rows = layer_sets.rows_of(tmp_path / "test.parquet", text, 60, 128)
    total = count = 0
    with torch.no_grad():
        for row in rows:
            ids, labels = (torch.tensor([row[name]]) for name in ("input_ids", "labels"))
            logits = keep_layers(whole, [1, 2, 4])(ids).logits[0, :-1]
            total += float(cross_entropy(logits, labels[0, 1:], reduction="sum"))
            count += int((labels[0, 1:] != -100).sum())
    assert run["tokens"] == count
    assert run["before"]["loss"] == pytest.approx(total / count, rel=1e-5)
    assert run["after"]["loss"] != run["before"]["loss"]
    assert len(torch.load(tmp_path / "states.pt")) == 2


def test_an_exit_head_is_trained_from_the_kept_states(words, tmp_path):
    words[words.index("1-2,4")] = "1-2"
    for exit_head in ("affine", "block"):
        layer_sets.main([*words, "--exit_head", exit_head])
    runs = list(map(json.loads, (tmp_path / "runs.jsonl").read_text().splitlines()))
    assert [run["settings"]["exit_head"] for run in runs] == ["affine", "block"]
    assert runs[0]["after"]["loss"] != runs[0]["before"]["loss"] != runs[1]["before"]["loss"]


def test_all_layers_train_from_the_kept_states(words, tmp_path):
    words[words.index("1-2,4")] = "1-2"
    for given in ([], ["--train_all"]):
        layer_sets.main([*words, "--exit_head", "affine", *given])
    frozen, trained = map(json.loads, (tmp_path / "runs.jsonl").read_text().splitlines())
    assert trained["settings"] == {**frozen["settings"], "train_all": True}
    assert trained["before"] == frozen["before"]
    assert trained["after"]["loss"] != frozen["after"]["loss"]


def test_kept_states_are_those_of_the_model_itself(words, monkeypatch):
    own = layer_sets.HealingTrainer.read_whole
    found = []

    def compared(trainer, inputs, by_head):
        state = layer_sets.WholeReading(*read(trainer, inputs, by_head))
        found.append((state, own(trainer, inputs, by_head)))
        return state

    read = layer_sets.FromStates.read_whole
    monkeypatch.setattr(layer_sets.FromStates, "read_whole", compared)
    layer_sets.main([*words, "--steps", "2"])
    for state, truth in found:
        mine, others = state.outputs["hidden"], truth.outputs["hidden"]
        torch.testing.assert_close(mine, others, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(state.last_shared, truth.last_shared, rtol=1e-2, atol=1e-2)
    assert len(found) == 2


def test_without_steps_nothing_is_trained(words, tmp_path):
    layer_sets.main([*words, "--steps", "0"])
    (run,) = map(json.loads, (tmp_path / "runs.jsonl").read_text().splitlines())
    assert "after" not in run
    assert run["before"]["loss"] != run["whole"]["loss"]
    assert not (tmp_path / "states.pt").exists()


def test_every_token_of_other_texts_counts_for_the_perplexity(words, tmp_path):
    texts = ["yes no yes", "no"]
    (tmp_path / "other").mkdir()
    file = tmp_path / "other" / "test.parquet"
    Dataset.from_list([{"text": text} for text in texts]).to_parquet(file)
    layer_sets.main([*words, "--text", str(file), "--steps", "1", "--bf16"])
    (run,) = map(json.loads, (tmp_path / "runs.jsonl").read_text().splitlines())
    assert run["settings"]["text"] == "other"

    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    losses = []
    for text in texts:
        ids = torch.tensor([tokenizer()(text)["input_ids"]])
        with torch.no_grad():
            logits = whole(ids).logits[0, :-1]
        losses.append(cross_entropy(logits, ids[0, 1:], reduction="none"))
    perplexity = float(torch.cat(losses).mean().exp())
    assert run["text"]["whole"]["perplexity"] == pytest.approx(perplexity, rel=1e-5)
