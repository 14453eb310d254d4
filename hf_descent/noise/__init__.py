"""Noise on the input embeddings, and where a model looks its tokens up."""
