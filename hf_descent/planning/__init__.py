"""What a training will need, from the shapes of its model alone: peak memory by part, and operations.

A step of training runs on torch's fake tensors, which have shapes and no values: the same model, layer losses,
backward pass and optimizer. Only what the probes find out by values (layers, norm and head, the shift of the labels)
is found on a narrow copy of the model with random weights, and carried over.

`meter.py` counts what a step holds and computes, `model.py` takes the step, `recipe.py` plans a recipe's settings.
"""

from .model import PlannedModel


__all__ = ["PlannedModel"]
