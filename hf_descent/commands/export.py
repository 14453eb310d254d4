"""`hf-descent export MODEL --layer K --output_dir DIR`: the first K layers as a checkpoint, and how to serve it."""

import argparse
from importlib import import_module
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from ..early_exit import truncate
from ..hub.facts import OWN_MODELS
from ..loading import CAUSAL_LMS, load_image_processor, load_model, load_tokenizer
from .closing import next_step


STANDALONE = """\
On its own, as any checkpoint of a {architecture}:
  {registers}{auto_class}.from_pretrained("{draft}")"""
SERVED = """
  vllm serve {draft}
  python -m sglang.launch_server --model-path {draft}
  python convert_hf_to_gguf.py {draft} --outfile draft.gguf && llama-server -m draft.gguf"""
# vLLM 0.33.0 and SGLang 0.5.23 parse them; llama.cpp 0c1e570 decodes with the two files and these options.
DRAFTING = """
As a draft of the whole model, whose text stays what it is:
  whole.generate(**inputs, assistant_model=AutoModelForCausalLM.from_pretrained("{draft}"))
  vllm serve {whole} --speculative-config \\
    '{{"method": "draft_model", "model": "{draft}", "num_speculative_tokens": 4}}'
  python -m sglang.launch_server --model-path {whole} --speculative-algorithm STANDALONE \\
    --speculative-draft-model-path {draft} --speculative-num-steps 4 --speculative-eagle-topk 1 \\
    --speculative-num-draft-tokens 5
  python convert_hf_to_gguf.py {whole} --outfile whole.gguf && llama-server -m whole.gguf \\
    --spec-type draft-simple -md draft.gguf --spec-draft-n-max 4
Without this checkpoint, and no layer run twice: whole.generate(**inputs, custom_generate=draft_with({layer}))"""
ONNX = """\
With ONNX Runtime, for rows of any number and length:
  session = onnxruntime.InferenceSession("{draft}/model.onnx")
  names = [given.name for given in session.get_inputs()]
  inputs = AutoTokenizer.from_pretrained("{draft}")(texts, padding=True, return_tensors="np")
  logits = session.run(["logits"], {{name: inputs[name] for name in names}})[0]"""
MERGED = "\n{model} holds an adapter: {whole} stands for what `hf-descent export {model} --layer {depth}` writes."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", help="output folder of a run, or a name on the Hub; adapters are merged"
    )
    parser.add_argument(
        "--layer", type=int, required=True, help="the last layer to keep, from 1 on"
    )
    parser.add_argument(
        "--output_dir", required=True, help="folder for the checkpoint, new or empty"
    )
    formats = "a checkpoint for `from_pretrained`, or a graph for ONNX Runtime, which computes whole texts anew"
    parser.add_argument(
        "--format", choices=("transformers", "onnx"), default="transformers", help=formats
    )


def run(args: argparse.Namespace) -> None:
    """Writes the first layers under the same head as a checkpoint of the model's own class, with its tokenizer, chat
    template and generation config, and prints commands that serve it. ValueError where the folder holds something, or
    the model has no such layer or cannot be cut by its config."""
    for package in ("onnx", "onnxscript") if args.format == "onnx" else ():
        import_module(package)  # raises before a model is loaded
    folder = Path(args.output_dir)
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise ValueError(f"`output_dir` {args.output_dir!r} is not empty; name another.")
    model, whole = load_model(args.model, images=True), args.model
    is_adapter = hasattr(model, "merge_and_unload")
    if is_adapter:
        model, whole = model.merge_and_unload(), "WHOLE"
    architecture = type(model).__name__
    reads_images = architecture.endswith("ForImageClassification")
    if reads_images and args.format == "onnx":
        raise ValueError(f"{architecture} reads images: only texts are exported with `onnx`.")
    if reads_images:
        processing, inputs = load_image_processor(args.model), None
    else:
        processing = load_tokenizer(args.model)
        inputs = dict(processing(["Two rows of text."] * 2, return_tensors="pt"))
    config = model.config.get_text_config()
    drafts = architecture in CAUSAL_LMS
    if not drafts and not reads_images and getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = processing.pad_token_id  # by it causal ones find a row's last token
    short = truncate(model, args.layer, inputs)
    if args.format == "onnx":
        save_onnx(short, inputs, folder)
    else:
        short.save_pretrained(folder)
    if processing is not None:
        processing.save_pretrained(folder)
    depth = config.num_hidden_layers
    auto_class = "AutoModelForSequenceClassification"
    if drafts:
        auto_class = "AutoModelForCausalLM"
    elif reads_images:
        auto_class = "AutoModelForImageClassification"
    text = (
        STANDALONE
        + (SERVED if drafts else "")
        + (DRAFTING if drafts and args.layer < depth else "")
    )
    text += MERGED if drafts and is_adapter and args.layer < depth else ""
    facts = {
        "model": args.model,
        "whole": whole,
        "draft": folder,
        "layer": args.layer,
        "depth": depth,
    }
    facts["registers"] = "import hf_descent.models; " * architecture.startswith(OWN_MODELS)
    print(
        (ONNX if args.format == "onnx" else text).format(
            architecture=architecture, auto_class=auto_class, **facts
        )
    )
    print(f"\nThe first {args.layer} of {depth} layers are in {folder}.")
    if args.format != "onnx":
        print(next_step(f"show {folder}", "shows what its layers predict"))


def save_onnx(model: PreTrainedModel, inputs: dict[str, Tensor], folder: Path) -> None:
    """Write the graph of tokens to logits, of any numbers of rows and tokens, by transformers' exporter."""
    from transformers.exporters import OnnxConfig, OnnxExporter

    model.config.get_text_config().use_cache = False  # keys and values are no outputs
    # Few of ONNX Runtime's operations know bfloat16.
    exported = OnnxExporter().export(model.float(), inputs, config=OnnxConfig(dynamic=True))
    if any(
        str(size).isdigit() for given in exported.program.graph.inputs for size in given.shape
    ):  # as Mamba's
        raise ValueError(
            f"{type(model).__name__} has a graph for texts of one length: use `--format transformers`."
        )
    exported.save_pretrained(folder)
