"""Tokenizers that need no file."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tiny.models import VOCAB


CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}</s>{% endgeneration %}"
    "{% else %}{{ message.content }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer(chat=True):
    """Bytes as tokens, with `<s>`, `</s>`, `<pad>` and the markers of a small chat template: 261 or 264 tokens."""
    roles = ["<user>", "<assistant>", "<system>"] if chat else []
    tokens = ["<pad>", "<s>", "</s>", "<unk>", *roles, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocab = {token: index for index, token in enumerate(tokens)}

    bytes_of = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    bytes_of.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_of.decoder = decoders.ByteLevel()

    return PreTrainedTokenizerFast(
        tokenizer_object=bytes_of,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=roles,
        chat_template=CHAT_TEMPLATE if chat else None,
    )


def word_tokenizer():
    """Splits at spaces; 40 tokens, "w1" has the id 3."""
    words = ["[PAD]", "[UNK]", *(f"w{number}" for number in range(VOCAB - 2))]
    vocab = {word: index for index, word in enumerate(words)}

    words_of = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    words_of.pre_tokenizer = pre_tokenizers.Whitespace()

    return PreTrainedTokenizerFast(tokenizer_object=words_of, pad_token="[PAD]", unk_token="[UNK]")
