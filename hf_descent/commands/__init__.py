"""The commands of `hf-descent`, one module each. Nothing in the library imports from here."""
