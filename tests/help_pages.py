"""Writes the stored help of the commands: `python tests/help_pages.py`. `tests/test_cli.py` compares it."""

import contextlib
import io
import os
from unittest import mock

from hf_descent.commands import COMMANDS, Command


STORED = [command for command in COMMANDS.values() if command.add_flags is None]
COLUMNS = "80"  # of the narrowest usual terminal


def help_of(command: Command) -> str:
    """The help that the command's own parser prints, 80 columns wide."""
    printed = io.StringIO()
    with (
        mock.patch.dict(os.environ, COLUMNS=COLUMNS),
        contextlib.redirect_stdout(printed),
        contextlib.suppress(SystemExit),
    ):
        command.module().parse(["--help"], f"hf-descent {command.name}", command.summary)
    return printed.getvalue()


if __name__ == "__main__":
    for command in STORED:
        command.help_page.parent.mkdir(exist_ok=True)
        command.help_page.write_text(help_of(command), encoding="utf-8")
