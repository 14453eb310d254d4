"""The commands of `hf-descent`, one module each. Nothing in the library imports from here.

A module with the name of the command has `run(*arguments)`. They come from `parse(argv, prog, description)` of that
module, or for a plain tool from its flags in `flags.py`. No command needs torch or transformers for its `--help`: help
that only a module can give is stored in `help/`, by `python tests/help_pages.py`.
"""

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import flags
from .arguments import refuse


@dataclass(frozen=True)
class Command:
    """A command of `hf-descent`.

    Args:
        name (`str`): what people type, and its module.
        group (`str`): where the help lists it.
        summary (`str`): what it does, in a line.
        add_flags (function, *optional*): adds the flags of a plain tool to a parser; `None` if the module parses.
    """

    name: str
    group: str
    summary: str
    add_flags: Callable[[argparse.ArgumentParser], None] | None = None

    def parse(self, argv: Sequence[str]) -> tuple:
        """The arguments of `run` from a command line; ValueError if it is wrong."""
        prog = f"hf-descent {self.name}"
        if self.add_flags is None:
            if list(argv) in (["-h"], ["--help"]):
                print(self.help_page.read_text(encoding="utf-8"), end="")
                sys.exit(0)
            return self.module().parse(argv, prog, self.summary)

        parser = argparse.ArgumentParser(prog=prog, description=self.summary, allow_abbrev=False)
        parser.error = refuse
        self.add_flags(parser)
        return (parser.parse_args(argv),)

    def run(self, *arguments) -> None:
        self.module().run(*arguments)

    @property
    def help_page(self) -> Path:
        """The stored help of a command whose module parses, since its imports take seconds."""
        return Path(__file__).parent / "help" / f"{self.name}.txt"

    def module(self):
        return importlib.import_module(f".{self.name}", __name__)


TRAIN = "Train"
MEASURE = "Measure a model"
USE = "Use a model"
COMMANDS = {
    command.name: command
    for command in (
        Command("demo", TRAIN, "compare three small denoisers on bundled photographs, in minutes", flags.demo),
        Command("classify", TRAIN, "fine-tune a text classifier from a recipe"),
        Command("sft", TRAIN, "fine-tune a language model on instructions from a recipe"),
        Command("denoise", TRAIN, "train a video denoiser from a recipe"),
        Command("evaluate", MEASURE, "measure every layer, with noise and without, and judge the constraints"),
        Command("compare", MEASURE, "compare evaluated runs: a table, paired tests and figures", flags.compare),
        Command("exit", MEASURE, "measure loss, accuracy and time of a model with fewer layers"),
        Command("lens", MEASURE, "show what every layer of any model knows, without training it"),
        Command("export", USE, "write some layers of a model as a checkpoint, and say how to serve it", flags.export),
        Command("show", USE, "open a local page: type a text, see what every layer predicts", flags.show),
        Command("card", USE, "write the model card of a run, and upload both if you ask for it", flags.card),
    )
}  # fmt: skip
