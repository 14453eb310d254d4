"""What the trainers delegate to: checks, checkpoints, callbacks, search."""
