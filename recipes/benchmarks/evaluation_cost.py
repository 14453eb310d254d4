"""Time of evaluating all layers, and of a noise curve, against a plain evaluation of the same model.

    python recipes/benchmarks/evaluation_cost.py [--layers 6 --hidden 192 --samples 256]
    python recipes/benchmarks/evaluation_cost.py --model llama --vocab 8192

A plain evaluation is `Trainer.evaluate` on texts that are tokenised beforehand. The noise curve has 9 levels and 3
draws; its time is divided by these 27 evaluations. All take turns in one process; on a CPU its processor time is
counted, which leaves out what other programs take.
"""

import tempfile
import time

import torch
from harness import parser, report, take_turns
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from hf_descent import DescentConfig, DescentTrainer, noise_curve


GAMMAS = [0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0]
MODELS = {"bert": (BertForSequenceClassification, BertConfig), "llama": (LlamaForCausalLM, LlamaConfig)}


def main():
    command = parser(__doc__, layers=6, hidden=192, samples=256, batch=32, length=64, vocab=1000)
    command.add_argument("--model", choices=MODELS, default="bert")
    options = command.parse_args()
    torch.set_num_threads(options.threads)
    model_class, config_class = MODELS[options.model]
    torch.manual_seed(0)
    model = model_class(
        config_class(
            vocab_size=options.vocab, hidden_size=options.hidden, intermediate_size=4 * options.hidden,
            num_hidden_layers=options.layers, num_attention_heads=options.hidden // 32,
        )
    )  # fmt: skip
    ids, mask = torch.randint(5, options.vocab, (options.samples, options.length)), torch.ones(options.length).long()
    data = [
        {"input_ids": row, "attention_mask": mask, "labels": row if options.model == "llama" else index % 2}
        for index, row in enumerate(ids)
    ]
    settings = {
        "output_dir": tempfile.mkdtemp(), "per_device_eval_batch_size": options.batch, "report_to": "none",
        "disable_tqdm": True, "prediction_loss_only": True,
    }  # fmt: skip
    plain = Trainer(model, TrainingArguments(**settings), eval_dataset=data)
    ours = DescentTrainer(model, DescentConfig(**settings, initial_loss_bound=10.0), eval_dataset=data)
    on_cpu = plain.model.device.type == "cpu"

    def timed(evaluate, evaluations=1):
        clock = time.process_time if on_cpu else time.perf_counter

        def measure():
            start = clock()
            evaluate()
            return (clock() - start) / evaluations

        return measure

    arms = {"plain evaluation": timed(plain.evaluate), "all layers": timed(ours.evaluate)}
    arms["noise curve, an evaluation"] = timed(
        lambda: noise_curve(model, data, GAMMAS, draws=3, batch_size=options.batch), 27
    )
    report(take_turns(arms, options.rounds), "plain evaluation", options.output, options=vars(options))


if __name__ == "__main__":
    main()
