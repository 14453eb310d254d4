"""`hf-descent export MODEL --layer K --output_dir DIR`: some layers as a checkpoint, and how to serve it."""

import argparse
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ..early_exit import keep_layers, truncate
from ..early_exit.layer_sets import layers_in, spans
from ..hub.facts import OWN_MODELS
from ..loading import (
    CAUSAL_LMS,
    is_text_model,
    load_image_processor,
    load_model,
    load_tokenizer,
)
from .closing import next_step, verdict_of
from .held_out import empty_folder


STANDALONE = """\
On its own, as any checkpoint of a {architecture}{needs}:
  {registers}{auto_class}.from_pretrained("{draft}")"""
SERVED = """
  vllm serve {draft}
  python -m sglang.launch_server --model-path {draft}
  python convert_hf_to_gguf.py {draft} --outfile draft.gguf && llama-server -m draft.gguf"""
# vLLM 0.33.0 and SGLang 0.5.23 parse them; llama.cpp 0c1e570 decodes with the two files and these options.
DRAFTING = """
As a draft of the whole model, whose text stays what it is (measure whether it is faster):
  whole.generate(**inputs, assistant_model=AutoModelForCausalLM.from_pretrained("{draft}"))
  vllm serve {whole} --speculative-config \\
    '{{"method": "draft_model", "model": "{draft}", "num_speculative_tokens": 4}}'
  python -m sglang.launch_server --model-path {whole} --speculative-algorithm STANDALONE \\
    --speculative-draft-model-path {draft} --speculative-num-steps 4 --speculative-eagle-topk 1 \\
    --speculative-num-draft-tokens 5
  python convert_hf_to_gguf.py {whole} --outfile whole.gguf && llama-server -m whole.gguf \\
    --spec-type draft-simple -md draft.gguf --spec-draft-n-max 4"""
ONNX = """\
With ONNX Runtime, for examples of any number and length:
  session = onnxruntime.InferenceSession("{draft}/model.onnx")
  names = [node.name for node in session.get_inputs()]
  inputs = AutoTokenizer.from_pretrained("{draft}")(texts, padding=True, return_tensors="np")
  logits = session.run(["logits"], {{name: inputs[name] for name in names}})[0]"""
MERGED = "\n{model} holds an adapter: {whole} stands for what `hf-descent export {model} --layer {depth}` writes."
AUTO_CLASSES = {
    "ForImageClassification": "AutoModelForImageClassification",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
}


def run(args: argparse.Namespace) -> None:
    """Write some layers under the same head as a checkpoint of the model's own class, with its tokenizer, chat
    template and generation config, and print commands that serve it. ValueError if the folder holds something, or
    the model has no such layer or cannot be cut by its config."""
    layers = layers_in(",".join(args.layers)) if args.layers else None
    is_onnx = args.format == "onnx"
    if is_onnx:
        for package in ("onnx", "onnxscript"):
            import_module(package)  # raises before a model is loaded
    folder = empty_folder("output_dir", args.output_dir)

    model = load_model(args.model, images=True)
    is_adapter = hasattr(model, "merge_and_unload")
    if is_adapter:
        model = model.merge_and_unload()
    processing, inputs = _processing(args.model, model, is_onnx)
    short = _shortened(model, args.layer, layers, inputs)

    if is_onnx:
        save_onnx(short, inputs, folder)
    else:
        short.save_pretrained(folder)

    if processing is not None:
        processing.save_pretrained(folder)

    names = {
        "model": args.model,
        "whole": "WHOLE" if is_adapter else args.model,
        "draft": folder,
        "layer": args.layer,
        "depth": model.config.get_text_config().num_hidden_layers,
    }
    print(ONNX.format(**names) if is_onnx else how_to_use(type(model).__name__, names))
    kept = f"The first {args.layer}" if layers is None else f"Layers {spans(layers)}"
    print(f"\n{kept} of {names['depth']} layers are in {folder}.")
    verdict = verdict_of(args.model)
    if verdict is not None:
        print(f"The verdict on the constraints of {args.model}:\n{verdict.headline}")
    if not is_onnx and is_text_model(str(folder)):
        print(next_step(f"show {folder}", "shows what its layers predict"))


def _processing(name: str, model: PreTrainedModel, is_onnx: bool) -> tuple[Any, dict | None]:
    """The tokenizer or image processor of the model `name`, and a batch of texts; both are `None` if no tokenizer is
    saved. There is no batch of images. ValueError if the export needs a tokenizer."""
    architecture = type(model).__name__
    if architecture.endswith("ForImageClassification"):
        if is_onnx:
            raise ValueError(f"{architecture} reads images: only texts are exported with `onnx`.")
        return load_image_processor(name), None

    config = model.config.get_text_config()
    # Causal classifiers find a row's last token by it.
    lacks_padding = architecture not in CAUSAL_LMS and getattr(config, "pad_token_id", None) is None
    try:
        tokenizer = load_tokenizer(name)
    except ValueError as error:
        if is_onnx or lacks_padding:
            raise ValueError(f"{error} Or cut the model in Python: `truncate(model, k)`.") from None
        print(f"{error} The layers are written without one.\n")
        return None, None

    if lacks_padding:
        config.pad_token_id = tokenizer.pad_token_id
    return tokenizer, dict(tokenizer(["Two rows of text."] * 2, return_tensors="pt"))


def _shortened(
    model: PreTrainedModel, layer: int | None, layers: list[int] | None, inputs: dict | None
) -> PreTrainedModel:
    if layers is None:
        return truncate(model, layer, inputs)
    return keep_layers(model, layers, inputs)


def how_to_use(architecture: str, names: Mapping[str, Any]) -> str:
    """The lines that load and serve a checkpoint, and for a language model use it as a draft of the whole one."""
    auto_class = "AutoModelForCausalLM"
    for ending, name in AUTO_CLASSES.items():
        if architecture.endswith(ending):
            auto_class = name
    registers = ""
    needs = ""
    if architecture.startswith(OWN_MODELS):
        registers = "import hf_descent.models; "
        needs = ", a class of this package, which must be installed and imported"

    parts = [STANDALONE]
    if architecture in CAUSAL_LMS:
        parts.append(SERVED)
    if architecture in CAUSAL_LMS and names["layer"] != names["depth"]:
        parts.append(DRAFTING)
        if names["whole"] != names["model"]:
            parts.append(MERGED)

    return "".join(parts).format(
        architecture=architecture,
        auto_class=auto_class,
        registers=registers,
        needs=needs,
        **names,
    )


def save_onnx(model: PreTrainedModel, inputs: dict[str, Tensor], folder: Path) -> None:
    """Write the graph of tokens to logits, of any numbers of rows and tokens, by transformers' exporter."""
    from transformers.exporters import OnnxConfig, OnnxExporter

    model.config.get_text_config().use_cache = False  # keys and values are no outputs
    # Few of ONNX Runtime's operations know bfloat16.
    exported = OnnxExporter().export(model.float(), inputs, config=OnnxConfig(dynamic=True))
    sizes = [size for graph_input in exported.program.graph.inputs for size in graph_input.shape]
    if any(str(size).isdigit() for size in sizes):  # as Mamba's
        raise ValueError(
            f"{type(model).__name__} has a graph for texts of one length: use `--format transformers`."
        )
    exported.save_pretrained(folder)
