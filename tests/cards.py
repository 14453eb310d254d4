"""A short training, and a model card that is checked as it is read."""

import re

import yaml
from huggingface_hub import ModelCard
from tiny.data import classification_data
from tiny.models import bert
from tiny.tokenizers import word_tokenizer
from tiny.training import config

from hf_descent import DescentTrainer


def trained(folder, model=None, data=None, **arguments):
    data = classification_data(16) if data is None else data
    model = bert() if model is None else model
    settings = config(folder, **arguments)
    trainer = DescentTrainer(
        model, settings, train_dataset=data, eval_dataset=data, processing_class=word_tokenizer()
    )
    trainer.train()
    trainer.save_model()
    return trainer


def read(folder):
    text = (folder / "README.md").read_text()
    assert check_card(text) == []
    for words in ("More information needed", "None", "nan", "{{", "{%", "TODO"):
        assert not re.search(rf"\b{words}\b" if words.isalpha() else re.escape(words), text), words
    assert "\n\n\n" not in text.split("---\n", 2)[2]
    return ModelCard.load(folder / "README.md"), text


def results_of(card):
    """The numbers that the Hub lists, by the names of their metrics."""
    return {result.metric_name: result.metric_value for result in card.data.eval_results}


def check_card(text):
    """What the Hub demands of a card's metadata; a list of complaints."""
    data = yaml.safe_load(re.match(r"\A---\n(.*?)\n---\n", text, re.DOTALL)[1])
    errors = [
        f"{key} must be a string"
        for key in ("base_model", "license")
        if not isinstance(data.get(key, ""), str)
    ]
    errors += [
        f"{key} must be a list"
        for key in ("tags", "datasets")
        if not isinstance(data.get(key, []), list)
    ]
    for result in (result for index in data.get("model-index", []) for result in index["results"]):
        words = [result["task"]["type"], result["dataset"]["name"], result["dataset"]["type"]]
        words += [metric["type"] for metric in result["metrics"]]
        errors += [f"{word} must be a string" for word in words if not isinstance(word, str)]
        values = [metric["value"] for metric in result["metrics"]]
        errors += [f"{x} must be a number" for x in values if type(x) not in (int, float) or x != x]
    return errors
