"""A Space with what every layer of a model predicts: the page of `hf-descent show`. `MODEL` names the model."""

import os

from hf_descent.commands.show import build
from hf_descent.loading import load_model, load_tokenizer


MODEL = os.environ["MODEL"]  # a variable of the Space's settings
demo = build(load_model(MODEL), load_tokenizer(MODEL))

if __name__ == "__main__":
    demo.launch()
