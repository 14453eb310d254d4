"""The task loss, of the model and of every layer."""
