"""A short training, and a model card that is checked as it is read."""

import re

from hub_server import check_card
from huggingface_hub import ModelCard
from tiny import bert, classification_data, config, word_tokenizer

from hf_descent import DescentTrainer


def trained(folder, model=None, data=None, **arguments):
    data = classification_data(16) if data is None else data
    model = bert() if model is None else model
    settings = config(folder, **arguments)
    trainer = DescentTrainer(model, settings, train_dataset=data, eval_dataset=data, processing_class=word_tokenizer())
    trainer.train()
    trainer.save_model()
    return trainer


def read(folder):
    text = (folder / "README.md").read_text()
    assert check_card(text) == []
    for words in ("More information needed", "None", "nan", "{{", "{%", "TODO"):
        assert not re.search(rf"\b{words}\b" if words.isalpha() else re.escape(words), text, re.IGNORECASE), words
    assert "\n\n\n" not in text.split("---\n", 2)[2]
    return ModelCard.load(folder / "README.md"), text
