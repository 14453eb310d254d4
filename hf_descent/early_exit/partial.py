"""The forward of a model through some of its layers, from the hidden states of the layer before them."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

from ..readout.stack import LayerStack, intercepted
from ..readout.tape import clone


class PartialForward:
    """Runs layers `first`..`last` of `model`; embeddings, masks, norm and head are the model's own, run in each call.

    `output` is the whole output of layer `last` in the last call. Hand it to a later call as `state`.
    """

    def __init__(self, model, stack: LayerStack):
        self.model = model
        self.stack = stack
        self.running = False

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Within it, call this object and not the model. Other threads run the whole model."""
        # Begun since: `intercepted` would end in another order.
        if "_call_impl" in self.stack.layers[0].__dict__:
            raise ValueError(
                f"{type(self.model).__name__} stops early in another thread: wait for it, or run the model whole."
            )
        self.thread = get_ident()
        with intercepted(self.stack.layers, self._run_layer):
            yield

    def __call__(self, first: int, last: int, state: Any = None, **inputs) -> Any:
        """The outputs of `model(**inputs)` if it stopped after `last`; `state` is the output of layer `first - 1`."""
        self.first = first
        self.last = last
        self.output = state
        self.calls = 0
        return self.model(**inputs)

    def _run_layer(self, module, call, *args, **kwargs):
        # `__call__` on its way to `forward`, or another's call.
        if self.running or get_ident() != self.thread:
            return call(*args, **kwargs)
        self.calls += 1
        if self.first <= self.calls <= self.last:
            self.running = True
            try:
                self.output = call(*args, **kwargs)
            finally:
                self.running = False
        return clone(self.output) if self.stack.clones else self.output
