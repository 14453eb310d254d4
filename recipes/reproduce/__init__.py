"""The paper's tables and figures from runs of this package: `python -m recipes.reproduce TABLE --scale cpu|gpu`.

`scales` says what each size of experiment is, `tables` which groups of runs stand side by side in a table or figure,
`runner` turns those into `hf-descent` commands and runs what is not finished, `collect` makes the results of them.
"""
