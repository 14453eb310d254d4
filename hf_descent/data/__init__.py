"""From a Hub name or local files to a `datasets.DatasetDict` that the trainer takes."""
