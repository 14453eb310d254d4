"""Time and memory of a noise curve of 9 levels and 3 draws, against 27 plain evaluations of the same classifier.

    python recipes/benchmarks/evaluation_cost.py [--layers 6 --hidden 192 --samples 256 --rounds 3]

A plain evaluation is `Trainer.evaluate` on texts that are tokenised beforehand. Both take turns in one process; on
a CPU its processor time is counted, which leaves out what other programs take. Memory is the peak of the process's
Python and NumPy allocations during a curve of the data, and of eight times the data.
"""

import argparse
import statistics
import tempfile
import time
import tracemalloc

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from hf_descent import noise_curve


GAMMAS = [0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0]


class Texts(Dataset):
    """Random token ids, made when they are asked for, so that data takes no memory."""

    def __init__(self, samples: int, length: int):
        self.samples, self.length = samples, length

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        if not 0 <= index < self.samples:
            raise IndexError(index)
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(5, 1000, (self.length,), generator=generator)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": index % 2}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    sizes = {"layers": 6, "hidden": 192, "samples": 256, "batch": 32, "length": 64, "rounds": 3}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=1000, hidden_size=options.hidden, intermediate_size=4 * options.hidden,
            num_hidden_layers=options.layers, num_attention_heads=options.hidden // 32,
        )
    )  # fmt: skip
    data = Texts(options.samples, options.length)
    arguments = TrainingArguments(
        tempfile.mkdtemp(), per_device_eval_batch_size=options.batch, report_to="none", disable_tqdm=True
    )
    trainer = Trainer(model, arguments, eval_dataset=data)
    device = trainer.model.device
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    plain, curves = [], []
    trainer.evaluate()
    for _ in range(options.rounds):
        start = clock()
        for _ in range(27):
            trainer.evaluate()
        plain.append(clock() - start)
        start = clock()
        noise_curve(model, data, GAMMAS, draws=3, batch_size=options.batch)
        curves.append(clock() - start)
    ratio = statistics.median(curves) / statistics.median(plain)
    print(f"{device}: 27 evaluations {statistics.median(plain):.2f} s, curve {statistics.median(curves):.2f} s")
    print(f"ratio {ratio:.3f}, that is {27 * ratio:.1f} plain evaluations")
    for factor in (1, 8):
        tracemalloc.start()
        noise_curve(model, Texts(options.samples * factor, 8), [0.0, 1.0], draws=1, batch_size=options.batch)
        print(f"peak with {options.samples * factor} samples: {tracemalloc.get_traced_memory()[1] / 1e6:.2f} MB")
        tracemalloc.stop()


if __name__ == "__main__":
    main()
