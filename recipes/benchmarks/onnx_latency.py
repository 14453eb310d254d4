"""Latency of a text classifier's first layers in ONNX Runtime, at batch 1, against all of them.

    python recipes/benchmarks/onnx_latency.py path/to/all-MiniLM-L6-v2 --layer 3 [--length 128]

The model is the encoder under a new linear readout of the token mean, cut and written by `hf-descent export`.
"""

import contextlib
import io
import tempfile
import time

import onnxruntime
import torch
from harness import parser, report, take_turns
from transformers import AutoTokenizer

from hf_descent import cli
from hf_descent.models import LinearReadoutForSequenceClassification


def main():
    command = parser(__doc__, layer=3, length=128, calls=50)
    command.add_argument("encoder", help="folder or name on the Hub")
    options = command.parse_args()
    model = LinearReadoutForSequenceClassification.from_encoder(
        options.encoder, "mean", num_labels=2
    )
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = options.threads
    rows, arms = {"input_ids": torch.randint(1000, 9000, (1, options.length)).numpy()}, {}
    rows["attention_mask"], rows["token_type_ids"] = rows["input_ids"] ** 0, rows["input_ids"] * 0
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(f"{folder}/model")
        AutoTokenizer.from_pretrained(options.encoder).save_pretrained(f"{folder}/model")
        for layer in (model.config.get_text_config().num_hidden_layers, options.layer):
            with contextlib.redirect_stdout(io.StringIO()):
                words = [
                    "--layer",
                    str(layer),
                    "--output_dir",
                    f"{folder}/{layer}",
                    "--format",
                    "onnx",
                ]
                cli.main(["export", f"{folder}/model", *words])
            session = onnxruntime.InferenceSession(f"{folder}/{layer}/model.onnx", settings)
            inputs = {given.name: rows[given.name] for given in session.get_inputs()}

            def seconds(session=session, inputs=inputs):
                start = time.perf_counter()
                for _ in range(options.calls):
                    session.run(["logits"], inputs)
                return (time.perf_counter() - start) / options.calls

            arms[f"{layer} layers"] = seconds
        report(
            take_turns(arms, options.rounds),
            next(iter(arms)),
            options.output,
            options=vars(options),
        )


if __name__ == "__main__":
    main()
