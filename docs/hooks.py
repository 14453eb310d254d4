"""What `mkdocs build` does beside rendering: the table of arguments, and links that the site cannot follow."""

import dataclasses
import re

from hf_descent.configs import DescentArguments


def on_page_markdown(markdown, **_):
    # A link out of the documentation works in the repository; on the site it becomes the path.
    markdown = re.sub(r"\[([^\]]+)\]\(\.\./([^)#]+)[^)]*\)", r"\1 (`\2`)", markdown)
    return markdown.replace("<!-- arguments -->", _arguments())


def on_page_content(html, **_):
    # [`~transformers.Trainer`], as docstrings of the ecosystem have it.
    return re.sub(r"\[<code>~?(?:\w+\.)*(\w+)</code>\]", r"<code>\1</code>", html)


def _arguments():
    rows = ["| argument | default | meaning |", "|---|---|---|"]
    for field in dataclasses.fields(DescentArguments):
        text = field.metadata["help"].replace("%%", "%").replace("|", "\\|")
        rows.append(f"| `{field.name}` | `{field.default!r}` | {text} |")
    return "\n".join(rows)
