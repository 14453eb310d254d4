"""Time of evaluating all layers, and of a noise curve, against a plain evaluation of the same model.

    python recipes/benchmarks/evaluation_cost.py [--layers 6 --hidden 192 --samples 256]
    python recipes/benchmarks/evaluation_cost.py --model llama --vocab 8192

A plain evaluation is `Trainer.evaluate` on tokenised texts. The time of the noise curve, of 9 levels and 3 draws, is
divided by these 27 evaluations. All take turns in one process; on a CPU its processor time is counted.
"""

import tempfile
import time
from functools import partial

import torch
import transformers
from harness import parser, report, take_turns

from hf_descent import DescentConfig, DescentTrainer, noise_curve


GAMMAS = [0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0]
MODELS = {
    "bert": transformers.AutoModelForSequenceClassification,
    "llama": transformers.AutoModelForCausalLM,
}


def measure(options):
    """Seconds of an evaluation by each arm in each round, and no starts."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        options.model, vocab_size=options.vocab, hidden_size=options.hidden, intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers, num_attention_heads=options.hidden // 32,
    )  # fmt: skip
    model = MODELS[options.model].from_config(config)
    ids, mask = (
        torch.randint(5, options.vocab, (options.samples, options.length)),
        torch.ones(options.length).long(),
    )
    data = [
        {
            "input_ids": row,
            "attention_mask": mask,
            "labels": row if options.model == "llama" else index % 2,
        }
        for index, row in enumerate(ids)
    ]
    settings = {
        "output_dir": tempfile.mkdtemp(), "per_device_eval_batch_size": options.batch, "report_to": "none",
        "disable_tqdm": True, "prediction_loss_only": True,
    }  # fmt: skip
    plain = transformers.Trainer(
        model, transformers.TrainingArguments(**settings), eval_dataset=data
    )
    ours = DescentTrainer(
        model, DescentConfig(**settings, initial_loss_bound=10.0), eval_dataset=data
    )
    erm = DescentTrainer(model, DescentConfig(**settings, objective="erm"), eval_dataset=data)
    clock = time.process_time if plain.model.device.type == "cpu" else time.perf_counter

    def seconds(evaluate, evaluations=1):
        start = clock()
        evaluate()
        return (clock() - start) / evaluations

    curve = partial(noise_curve, model, data, GAMMAS, draws=3, batch_size=options.batch)
    arms = {
        "plain evaluation": partial(seconds, plain.evaluate),
        "all layers": partial(seconds, ours.evaluate),
    }
    arms["all layers, by eval_strategy"] = partial(seconds, partial(ours._evaluate, None, None))
    arms["all layers, beside plain training"] = partial(seconds, erm.evaluate)
    arms["noise curve, an evaluation"] = partial(seconds, curve, 27)
    return take_turns(arms, options.rounds), {}


def main():
    command = parser(__doc__, layers=6, hidden=192, samples=256, batch=32, length=64, vocab=1000)
    command.add_argument("--model", choices=MODELS, default="bert")
    options = command.parse_args()
    torch.set_num_threads(options.threads)
    report(measure(options)[0], "plain evaluation", options.output, options=vars(options))


if __name__ == "__main__":
    main()
