"""The layer losses of one micro-batch in `DescentTrainer` where the fused readout applies."""

from typing import Any

import numpy as np
import torch
from transformers.utils import logging

from ..readout.head import FusedReadout


logger = logging.get_logger(__name__)

# From this vocabulary on, reading every layer on all tokens costs several times the model itself.
LARGE_VOCABULARY = 8192
# Chosen by measurement (`recipes/benchmarks/`): violations are two to three times as noisy as on all tokens, which the
# multipliers average out over many steps, and a step costs little more than plain training.
DEFAULT_TOKEN_FRACTION = 0.125


class FusedStepMixin:
    """The part of [`DescentMixin`] that reads layers with [`FusedReadout`] instead of the replay."""

    _fused: FusedReadout | None = None
    _token_fraction = 1.0
    _token_statistics = False  # whether a subclass logs entropy and accuracy, which `_fused_losses` then holds
    _keeps_logits = True  # whether the caller wants the model's own logits
    _last_draw = (-1, 0)  # step, and draws made in it by this run
    _skipped, _reads = 0.0, 0  # shares of gradient that the threshold left out since the last log, and their number

    def _find_fused_readout(self, model, inputs) -> None:
        args = self.args
        self._fused, fraction = None, args.readout_token_fraction
        self._last_draw, self._skipped, self._reads = (-1, 0), 0.0, 0
        try:
            if self._readout_fn is not None or self.compute_loss_func is not None:
                raise ValueError("The readout or the loss is the caller's own.")
            self._fused = FusedReadout.probe(
                model, inputs, args.label_smoothing_factor, args.readout_gradient_threshold
            )
        except ValueError as reason:
            if fraction not in (None, 1.0) or args.readout_gradient_threshold is not None:
                raise ValueError(
                    "`readout_token_fraction` and `readout_gradient_threshold` need the fused readout, which does not "
                    f"apply: {reason} Leave both unset."
                ) from reason
            logger.info(f"Layers are read by replay; the fused head is for other models ({reason})")
            return
        # Trainer goes by the name of the class, which says nothing for some (GPT2LMHeadModel).
        self._loss_shifts_labels = self._fused.shifts_labels
        if fraction is None:
            fraction = DEFAULT_TOKEN_FRACTION if self._fused.vocab_size >= LARGE_VOCABULARY else 1.0
        self._token_fraction = fraction
        logger.info(
            f"Layers are read by the fused head ({self._fused.vocab_size} classes), intermediate ones on "
            f"{fraction:.4g} of the labelled tokens (`readout_token_fraction`)."
        )

    def _fused_loss(self, model, inputs, share, weighted) -> tuple[torch.Tensor, Any]:
        """The objective of a micro-batch (in evaluation: f_L) and the model's outputs.

        Args:
            share: the micro-batch's share of the items of the step, times the number of processes.
            weighted: layers (1-based) that the objective of this step depends on.
        """
        training, step, state, num_layers = model.training, self.state.global_step, self._state, self._fused.num_layers
        tokens = self._fused.tokens(inputs, *((self._token_fraction, self._token_generator()) if training else ()))
        # What the sums of this micro-batch are divided by, to give its mean times its share.
        items = max(len(tokens.rows), 1) / torch.where(share > 0, share, 1.0)
        unweighted = [layer for layer in range(1, num_layers + 1) if layer not in weighted]

        def weights(parts):
            parts = parts.detach().requires_grad_()  # [layers]
            return torch.autograd.grad(state.objective(parts, step, share), parts)[0]

        def on_forward(read, outputs, hidden_states):
            if not training:
                self._fused_losses = read(tokens, token_statistics=self._token_statistics)
                return self._fused_losses.final_sum / max(len(tokens.rows), 1)
            for layer in state.trained_layers:
                if layer < num_layers and not hidden_states[layer - 1].requires_grad:
                    raise self._readout.without_gradient(layer)
            # The weights of a linear objective are its gradient anywhere; those of a penalty need the losses first.
            parts = torch.zeros(num_layers, device=share.device)
            if self.args.objective in ("hinge", "quadratic") and not state.inactive(step):
                with torch.no_grad():
                    parts = read(tokens).sums / items
            self._fused_losses = losses = read(
                tokens,
                weights(parts),
                num_items=items,
                value_only=unweighted,
                token_statistics=self._token_statistics,
            )
            # Trainer's label smoothing leaves the router's loss out.
            if self._model_scores and self._fused.router_loss_weight and outputs.get("aux_loss") is not None:
                return losses.objective + self._fused.router_loss_weight * outputs["aux_loss"] * share
            return losses.objective

        with self._fused.attach(on_forward, keep_logits=self._keeps_logits):
            outputs = model(**inputs)
        losses = self._fused_losses
        if training:
            self._layer_sums = self._layer_sums + losses.sums / items / self.args.world_size
            self._reported_loss = losses.final_sum / items
            self._skipped, self._reads = self._skipped + losses.skipped, self._reads + 1
            self.loss_is_scaled_for_ga = True
        else:
            self._eval_sums += torch.cat([losses.sums, losses.sums.new_full((1,), losses.num_tokens)])
        return outputs["loss"], outputs

    def _threshold_logs(self) -> dict[str, float]:
        """The share of gradient that `readout_gradient_threshold` left out since the last call; 0: all was dense."""
        skipped, reads, self._skipped, self._reads = self._skipped, self._reads, 0.0, 0
        if self.args.readout_gradient_threshold is None or not reads:
            return {}
        return {"readout_gradient_skipped": float(skipped / reads)}

    def _token_generator(self) -> torch.Generator:
        """Keyed by where training stands, so that a resumed run draws the tokens of the run it continues."""
        step, draws = self._last_draw
        draws = draws + 1 if step == self.state.global_step else 0
        self._last_draw = (self.state.global_step, draws)
        # One number more than the key of the noise, which else would be drawn from the same stream.
        key = (self.args.process_index, self.state.global_step, draws, 1)
        seed = np.random.SeedSequence(self.args.seed, spawn_key=key).generate_state(1, np.uint64)[0]
        return torch.Generator().manual_seed(int(seed))
