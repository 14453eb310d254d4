"""What the tests share: tiny models, rows that they learn, short trainings, and truths to compare with."""

from tiny.data import Stream, batches, classification_data, language_data, toy_rows  # noqa: F401
from tiny.devices import DEVICE, TEST_DEVICE  # noqa: F401
from tiny.models import SIZES, VOCAB, bert, gpt2, llama, spread  # noqa: F401
from tiny.oracles import assert_equal_runs, naive_layer_losses, pool, truncated  # noqa: F401
from tiny.tokenizers import tokenizer, word_tokenizer  # noqa: F401
from tiny.training import InOrder, config, fitted, trained, watch  # noqa: F401
