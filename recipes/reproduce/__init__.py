"""The paper's tables and figures from runs of this package: `python -m recipes.reproduce TABLE --scale cpu|gpu`.

`experiments.yaml` says what is trained, `experiments` which runs stand side by side, `runner` turns them into
commands and runs what is not finished, `collect` makes one table of them. `tune` searches settings, `generate` answers
instructions.
"""
