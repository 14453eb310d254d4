"""Small models, tables and videos on disk, as the commands read them."""

import json

import numpy as np
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import DistilBertConfig, DistilBertModel, PreTrainedTokenizerFast

from tiny.models import llama
from tiny.tokenizers import tokenizer


WORDS = ["good", "fine", "great", "bad", "poor", "awful", "film", "the", "was", "a"]


def save_tiny_model(folder):
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocab = {word: i for i, word in enumerate([*special, *WORDS])}
    inner = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    inner.normalizer, inner.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    PreTrainedTokenizerFast(
        tokenizer_object=inner,
        **dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), special)),
        model_max_length=32,
        model_input_names=["input_ids", "attention_mask"],
    ).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {
        "dim": 16,
        "hidden_dim": 32,
        "n_heads": 2,
        "n_layers": 3,
        "max_position_embeddings": 32,
    }
    DistilBertModel(DistilBertConfig(vocab_size=len(vocab), **sizes)).save_pretrained(folder)
    return str(folder)


def save_generator(folder, chat=False, **config):
    tok = tokenizer(chat)
    tok.save_pretrained(folder)
    config = {
        "initializer_range": 0.5,
        "noise_sigma": 0.5,
        "max_position_embeddings": 2048,
        **config,
    }
    llama(2, vocab_size=len(tok), eos_token_id=tok.eos_token_id, **config).save_pretrained(folder)
    return str(folder)


def save_instructions(folder):
    """A language model, and a file of instructions."""
    rows = [{"instruction": f"Count to {count}", "output": "one two three"} for count in range(6)]
    (folder / "rows.json").write_text(json.dumps(rows))
    return save_generator(folder / "model"), str(folder / "rows.json")


def write_rows(folder):
    sides = (WORDS[:3], WORDS[3:6])
    single = [f"the film was {sides[i % 2][i % 3]},{i % 2}" for i in range(64)]
    pairs = [
        f"the film was {sides[i % 2][i % 3]},a {sides[i // 2 % 2][0]} film,{i % 2 * 2}"
        for i in range(64)
    ]
    (folder / "train.csv").write_text("\n".join(["text,label", *single]))
    (folder / "pairs.csv").write_text("\n".join(["premise,hypothesis,label", *pairs]))


def encode_video(path, frames):
    """A lossless video of gray frames, uint8 `[height, width]` each."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("ffv1", rate=10)
        (stream.height, stream.width), stream.pix_fmt = frames[0].shape, "gray"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="gray")))
        container.mux(stream.encode())
    return str(path)


def write_video(path, count, seed):
    """A bright square that moves over a smooth ground, one pixel in six frames."""
    rows, columns = np.mgrid[:32, :32]
    frames = np.repeat((40 + 3 * rows + seed * columns)[None].astype(np.uint8), count, axis=0)
    for number, frame in enumerate(frames):
        frame[8:16, number // 6 + seed : number // 6 + seed + 8] = 220
    return encode_video(path, frames)
