"""`hf-descent show MODEL`: a local page with every layer's prediction of a text, the exit, and what noise does."""

import argparse
from collections.abc import Callable
from html import escape

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..early_exit import ConfidenceExit, ConfidenceReport
from ..early_exit.confidence import uncertainty
from ..loading import best_device, load_model, load_tokenizer, position_limit
from ..noise.embedding_noise import EmbeddingNoise
from ..readout.replay import Readout, evaluating, output_logits
from ..runs import RunFolder


DRAWS = 8  # draws of the noise
LISTED = 3  # predictions that are shown for each layer
CSS = """
table {width: 100%; font-variant-numeric: tabular-nums}
th, td {font-weight: normal; white-space: nowrap}
.exit {background: var(--color-accent-soft)}
"""


def run(args: argparse.Namespace) -> None:
    """Serve the page until it is interrupted. The threshold starts at the one of `hf-descent exit`, if that ran."""
    model = load_model(args.model).to(best_device())
    tokenizer = load_tokenizer(args.model)
    reports = RunFolder(args.model).results(ConfidenceReport, "confidence_exit")
    build(model, tokenizer, *[report.threshold for report in reports]).launch(server_port=args.port)


def build(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, threshold: float = 0.1):
    """Build the page, a `gradio.Blocks` to `launch`, for a classifier of one label per text or a causal language
    model.

    `threshold`, at which the slider starts, is the uncertainty below which a layer is sure. Nothing leaves this
    machine. ValueError if the layers have no shared readout, or their input takes no noise.
    """
    import gradio

    ConfidenceExit(model, threshold)  # refuses several labels for one text
    noise = EmbeddingNoise(model, 0.0, seed=0)
    read_layers(model, tokenizer, "a", noise)  # raises its errors now, not at the first text
    is_classifier = "ForSequenceClassification" in type(model).__name__

    def name(number: int) -> str:
        if is_classifier:
            return str(model.config.id2label[number])
        return repr(tokenizer.decode([number]))

    def show(text: str, threshold: float, gamma: float) -> str:
        if not text:
            return ""
        try:
            clean = read_layers(model, tokenizer, text, noise)
            levels = [noise.at(gamma, draw) for draw in range(DRAWS if gamma else 0)]
            draws = [read_layers(model, tokenizer, text, level) for level in levels]
        except ValueError as error:
            raise gradio.Error(str(error)) from error
        return as_html(clean, draws, threshold, name)

    with gradio.Blocks(analytics_enabled=False, title="Layer by layer", fill_width=True) as page:
        gradio.Markdown(f"## {escape(type(model).__name__)}, layer by layer")
        text = gradio.Textbox(label="Text", placeholder="Type a text, then Enter")
        with gradio.Row():
            least = gradio.Slider(
                0, 1, threshold, step=0.01, label="Exit once the uncertainty is below"
            )
            gamma = gradio.Slider(0, 3, 0, step=0.05, label="Noise on the embeddings (gamma)")
        table = gradio.HTML(css_template=CSS)
        gradio.on(
            [text.submit, least.change, gamma.change],
            show,
            [text, least, gamma],
            table,
            api_name="show",
        )
    return page


def read_layers(model, tokenizer, text: str, noise: EmbeddingNoise) -> torch.Tensor:
    """The logits of every layer for `text`, or for the token after it, `[layers, classes]`, float32 on the CPU.

    ValueError if the text has no tokens or too many, or there is no shared readout.
    """
    inputs = tokenizer(text, return_tensors="pt").to(model.device)
    count = inputs["input_ids"].shape[1]
    limit = position_limit(model)
    if count == 0 or (limit is not None and count > limit):
        most = "any number" if limit is None else limit
        raise ValueError(f"The text has {count} tokens; the model takes 1 to {most}.")

    def score(outputs) -> torch.Tensor:
        logits = output_logits(outputs)[0]  # [classes] or [seq, vocabulary]
        return (logits if logits.dim() == 1 else logits[-1]).float().cpu()

    reader = Readout.probe(model, inputs)
    with evaluating(model), noise:
        logits = torch.stack(reader.layer_scores(inputs, score))
    if logits.shape[1] < 2:
        raise ValueError(
            f"{type(model).__name__} has {logits.shape[1]} output; give a model of two classes or more."
        )
    return logits


def as_html(
    clean: torch.Tensor, draws: list[torch.Tensor], threshold: float, name: Callable[[int], str]
) -> str:
    """A sentence and a table of the logits `[layers, classes]`: `clean` without noise, `draws` for each noise draw."""

    exit_layer = exit_of(clean, threshold)
    columns = {
        "layer": range(1, len(clean) + 1),
        "predictions": [likeliest(logits.softmax(-1), name) for logits in clean],
        "uncertainty": [f"{value:.3f}" for value in uncertainty(clean)],
    }
    summary = f"Exit after layer {exit_layer} of {len(clean)}."
    if draws:
        noisy = torch.stack(draws, dim=1)  # [layers, draws, classes]
        kept = (noisy.argmax(-1) == clean.argmax(-1)[:, None]).sum(1)  # [layers]
        columns["kept under noise"] = [f"{count} of {len(draws)}" for count in kept]
        columns["mean predictions under noise"] = [
            likeliest(logits.softmax(-1).mean(0), name) for logits in noisy
        ]
        exits = [exit_of(logits, threshold) for logits in draws]
        summary += f" Under noise after layers {min(exits)} to {max(exits)}."

    head = "".join(f"<th>{title}</th>" for title in columns)
    rows = []
    for layer, cells in enumerate(zip(*columns.values()), start=1):
        mark = " class=exit" if layer == exit_layer else ""
        rows.append(f"<tr{mark}>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")

    return f"<p>{summary}</p><table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def exit_of(logits: torch.Tensor, threshold: float) -> int:
    """The first layer whose uncertainty is below the threshold, or the last, for `logits` `[layers, classes]`."""
    for layer, value in enumerate(uncertainty(logits), start=1):
        if value < threshold:
            return layer
    return len(logits)


def likeliest(probabilities: torch.Tensor, name: Callable[[int], str]) -> str:
    """The classes with the largest `probabilities` `[classes]`, by name, with their shares."""
    shares, numbers = probabilities.topk(min(LISTED, len(probabilities)))
    pairs = zip(shares.tolist(), numbers.tolist())
    return escape(", ".join(f"{name(number)} {share:.1%}" for share, number in pairs))
