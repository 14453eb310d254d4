"""Tiny random models and learnable toy data shared by the tests."""

import copy
import os

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.utils.data import IterableDataset, SequentialSampler
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TrainerCallback,
    default_data_collator,
)

from hf_descent import DescentConfig, DescentTrainer


VOCAB = 40
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TEST_DEVICE = (
    DEVICE if "TESTS_ON_DEVICE" in os.environ else "cpu"
)  # of tests that `recipes/benchmarks/gpu.py` runs


SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}


def bert(num_layers=3, num_labels=3, dropout=0.0, seed=0, **config):
    torch.manual_seed(seed)
    dropouts = dict.fromkeys(
        ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"), dropout
    )
    sizes = SIZES | {
        "vocab_size": VOCAB,
        "num_hidden_layers": num_layers,
        "max_position_embeddings": 32,
    }
    return BertForSequenceClassification(
        BertConfig(num_labels=num_labels, **sizes, **dropouts, **config)
    )


def llama(num_layers=3, seed=0, vocab_size=VOCAB, **config):
    torch.manual_seed(seed)
    sizes = SIZES | {
        "vocab_size": vocab_size,
        "num_hidden_layers": num_layers,
        "max_position_embeddings": 64,
    }
    return LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **sizes | config))


def gpt2(num_layers=3, **config):
    """Shifts its labels, which its name does not tell."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCAB,
        "n_positions": 32,
        "n_embd": 16,
        "n_layer": num_layers,
        "n_head": 2,
    }
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**sizes | dropouts | config))


def spread(model):
    """Weights of order one, so that layers differ and samples are of different difficulty."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=4.0 * parameter[0].numel() ** -0.5)
    return model.eval()


CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}</s>{% endgeneration %}"
    "{% else %}{{ message.content }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer(chat=True):
    """Bytes as tokens, with `<s>`, `</s>`, `<pad>` and the markers of a small chat template: 261 or 264 tokens."""
    special = [
        "<pad>",
        "<s>",
        "</s>",
        "<unk>",
        *(["<user>", "<assistant>", "<system>"] if chat else []),
    ]
    vocab = {
        token: index
        for index, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])
    }
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    inner.pre_tokenizer, inner.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        additional_special_tokens=special[4:], chat_template=CHAT_TEMPLATE if chat else None,
    )  # fmt: skip


def word_tokenizer():
    """Splits at spaces; 40 tokens, "w1" has the id 3."""
    words = {
        word: index
        for index, word in enumerate(["[PAD]", "[UNK]", *(f"w{i}" for i in range(VOCAB - 2))])
    }
    inner = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]")


def classification_data(count=64, num_labels=3, length=10, seed=0, pad=True):
    """Sequences whose third token tells the label; padded to different lengths."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        label = int(torch.randint(num_labels, (1,), generator=generator))
        ids = torch.randint(10, VOCAB, (length,), generator=generator)
        ids[2] = 3 + label
        real = int(torch.randint(5, length + 1, (1,), generator=generator)) if pad else length
        mask = (torch.arange(length) < real).long()
        rows.append({"input_ids": ids * mask, "attention_mask": mask, "labels": label})
    return rows


def toy_rows(count, seed=0):
    return classification_data(count, length=8, seed=seed, pad=False)


def language_data(count=32, length=12, seed=0, ragged=True):
    """Counting sequences modulo the vocabulary; different numbers of labelled tokens per row."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        ids = (torch.randint(VOCAB, (1,), generator=generator) + torch.arange(length)) % VOCAB
        labels = ids.clone()
        if ragged:
            labels[: int(torch.randint(0, length - 2, (1,), generator=generator))] = -100
        rows.append(
            {
                "input_ids": ids,
                "attention_mask": torch.ones(length, dtype=torch.long),
                "labels": labels,
            }
        )
    return rows


class Stream(IterableDataset):
    """Rows without a length; those of an iterator can be read once."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def config(output_dir, **arguments):
    """Quick, silent training arguments; constraints known from the start unless said otherwise."""
    defaults = {
        "report_to": "none", "use_cpu": TEST_DEVICE == "cpu", "disable_tqdm": True, "save_strategy": "no",
        "per_device_train_batch_size": 8, "max_steps": 6, "logging_steps": 1, "learning_rate": 1e-2,
        "descent_alpha": 0.3, "initial_loss_bound": 1.0, "dual_warmup_steps": 0,
    }  # fmt: skip
    return DescentConfig(output_dir=str(output_dir), **{**defaults, **arguments})


class InOrder(DescentTrainer):
    def _get_train_sampler(self, train_dataset=None):
        return SequentialSampler(self.train_dataset if train_dataset is None else train_dataset)


def fitted(trainer, checkpoint=None):
    """The trainer after training, from a checkpoint on where one is given."""
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer


def trained(model, args, trainer_class=DescentTrainer, **given):
    return fitted(trainer_class(model, args, **given))


def watch(event, see):
    """A callback, and the list of what it sees at each event: `see(args, state, arguments)`."""
    seen = []

    def keep(self, args, state, control, **kwargs):
        seen.append(see(args, state, kwargs))

    return type("Watch", (TrainerCallback,), {event: keep})(), seen


def truncated(model, layers):
    """An oracle that shares no code with the readout: the model with its upper layers cut off."""
    model = copy.deepcopy(model)
    model.base_model.encoder.layer = model.base_model.encoder.layer[:layers]
    return model


def assert_equal_runs(one, other):
    """The same weights, and multipliers where there are some, to the last bit."""
    torch.testing.assert_close(one.model.state_dict(), other.model.state_dict(), rtol=0, atol=0)
    if one.multipliers is not None:
        assert torch.equal(one.multipliers.values, other.multipliers.values)


def naive_layer_losses(model, batch):
    """BERT's layer losses by its hidden states, pooler and classifier."""
    hidden_states = model.bert(
        batch["input_ids"], batch["attention_mask"], output_hidden_states=True
    ).hidden_states
    logits = [model.classifier(model.bert.pooler(hidden)) for hidden in hidden_states[1:]]
    return torch.stack([F.cross_entropy(logit, batch["labels"]) for logit in logits])  # [layers]


def pool(hidden, mask, pooling):
    """The first token, or the mean of those that the mask keeps, one row at a time."""
    rows = [
        row[0] if pooling == "cls" else row[keep.bool()].mean(0) for row, keep in zip(hidden, mask)
    ]
    return torch.stack(rows)


def batches(data, size=8):
    for start in range(0, len(data), size):
        yield default_data_collator(data[start : start + size])
