"""What `readout_gradient_threshold` saves on a trained language model, and what it changes in the gradients.

    python recipes/benchmarks/gradient_threshold.py path/to/model texts.parquet [--thresholds 1e-3 1e-2]

One row of the text is read by the model's own norm and head: naively, exactly, and with each threshold. A step is the
forward and backward pass of the layers, measured once, and their losses with the gradients of these: of all layers
(weights from 0.5 to 1.5), or of the last one alone, whose predictions are calibrated whatever the model was trained
for. Processor time on one thread; errors are norms relative to the exact gradient of hidden states and of the head.
"""

import argparse
import time
from functools import partial

import torch
from lm_step import token_ids
from transformers import AutoModelForCausalLM

from hf_descent.readout.linear_cross_entropy import HeadLoss, Workspace, fused_layer_losses, labelled_tokens


def seconds_of(call, *arguments):
    start = time.process_time()
    call(*arguments)
    return time.process_time() - start


def measured(read, states, weights, head):
    """Seconds of `read`, and the gradients of hidden states and head that it leaves."""
    states, head.weight.grad = [state.detach().requires_grad_() for state in states], None
    seconds = seconds_of(read, states, weights)
    return seconds, [torch.stack([state.grad for state in states]), head.weight.grad]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("text_file", help="parquet, json, jsonl, csv or txt")
    parser.add_argument("--text_column", default="text")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--thresholds", type=float, nargs="+", default=[1e-3, 1e-2])
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).train()
    labels = torch.tensor(token_ids(options, 1))  # [1, length]
    norm, head, tokens, workspace = model.model.norm, model.lm_head, labelled_tokens(labels), Workspace()

    hidden_states = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda module, args, output: hidden_states.append(output))
    trunk = seconds_of(model.model, labels)
    trunk += seconds_of(hidden_states[-1].backward, torch.randn_like(hidden_states[-1]))

    def naive(states, weights):
        losses = [
            model.loss_function(logits=head(norm(state)), labels=labels, vocab_size=head.out_features)
            for state in states
        ]
        weights.dot(torch.stack(losses)).backward()

    def ours(states, weights, threshold=None):
        loss = HeadLoss(gradient_threshold=threshold)
        out = fused_layer_losses(states, tokens, norm, head, weights, head_loss=loss, workspace=workspace)
        out.objective.backward()

    arms = {"exact": ours, "naive": naive}
    arms |= {f"threshold {threshold:g}": partial(ours, threshold=threshold) for threshold in options.thresholds}

    weights = torch.linspace(0.5, 1.5, len(hidden_states))
    for title, first in (("all layers", 0), ("the last layer alone", len(weights) - 1)):
        found = {name: measured(arm, hidden_states[first:], weights[first:], head) for name, arm in arms.items()}
        (slowest, _), (_, exact) = found["naive"], found["exact"]
        for name, (seconds, gradients) in found.items():
            errors = [((got - wanted).norm() / wanted.norm()).item() for got, wanted in zip(gradients, exact)]
            step = (trunk + seconds) / (trunk + slowest)
            print(f"{title}, {name}: {seconds:.2f} s, {seconds / slowest:.2f} of naive, a step {step:.2f}; errors "
                  f"{errors[0]:.1e} (hidden states) {errors[1]:.1e} (head)")  # fmt: skip


if __name__ == "__main__":
    main()
