"""The pages have a form that is easy to read, their numbers stand in the results, and their code runs."""

import pydoc
import re
import runpy

import pytest
from programs import ROOT
from tiny.data import classification_data
from tiny.models import bert
from tiny.tokenizers import word_tokenizer
from tiny.training import config, trained

import hf_descent
from hf_descent import early_exit, evaluation


README = (ROOT / "README.md").read_text()


# Form: sizes, tables, and numbers that stand in the results


RESULTS = runpy.run_path(str(ROOT / "docs/results_page.py"))
PAGES = sorted((ROOT / "docs").glob("*.md"))
RECIPE_PAGES = sorted((ROOT / "recipes").rglob("README.md"))
DOCUMENTS = [ROOT / "README.md", *PAGES, *RECIPE_PAGES]
LIMITS = {
    ROOT / "README.md": 7_000,
    ROOT / "CHANGELOG.md": 6_000,
    ROOT / "recipes/README.md": 3_000,
    **dict.fromkeys(PAGES, 10_000),
}


def name_of(path):
    return str(path.relative_to(ROOT))


def prose(text):
    """A document without its code, tables and folded commands."""
    text = re.sub(r"<details.*?</details>", "", text, flags=re.DOTALL)
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return "\n".join(line for line in text.splitlines() if not line.startswith(("|", "<!--")))


def tables(text):
    """The lines of each table."""
    found = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    return [block.splitlines() for block in found]


@pytest.mark.parametrize("path", sorted({*LIMITS, *RECIPE_PAGES}), ids=name_of)
def test_documents_are_short(path):
    assert len(path.read_text()) <= LIMITS.get(path, 2_500)


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_a_page_begins_with_what_its_reader_can_do(path):
    beginning = path.read_text().split("\n\n")[1]
    starts = {"index.md": "Fine-tune ", "api.md": "On this page you can "}
    assert beginning.startswith(starts.get(path.name, "After this page "))


def test_the_site_and_its_first_page_list_every_page():
    navigation = (ROOT / "mkdocs.yml").read_text()
    first = (ROOT / "docs/index.md").read_text()
    for path in PAGES:
        assert f": {path.name}\n" in navigation
        is_part = path.name.startswith("results_") or path.name == "index.md"
        assert is_part or f"]({path.name})" in first


def test_the_lines_of_the_readme_are_short():
    assert all(len(line) <= 120 for line in prose(README).splitlines())


@pytest.mark.parametrize("path", RESULTS["documents"](), ids=name_of)
def test_generated_tables_are_those_of_the_results(path):
    text = path.read_text()
    assert RESULTS["filled"](text) == text, "run `python docs/results_page.py`"


def test_what_the_readme_buys_and_costs_is_generated():
    section = README.split("## What it buys and costs")[1].split("\n## ")[0]
    marked = re.findall(r"<!-- table (.+?) -->", section)
    assert marked == ["exits", "price", "time"] and len(tables(section)) == len(marked)


def has_numbers_alone(cell):
    """Whether a cell has digits and signs, and no words; a date is no number."""
    is_date = re.fullmatch(r"\s*\d{4}-\d\d-\d\d\s*", cell)
    has_digits = re.search(r"\d", cell)
    return not is_date and has_digits and re.fullmatch(r"[\s\d.,;:/±+-]+", cell)


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_a_cell_of_a_table_has_one_number(path):
    for _header, _line, *rows in tables(path.read_text()):
        for row in rows:
            for cell in row.strip("|").split("|"):
                if has_numbers_alone(cell):
                    assert len(re.findall(r"\d+(?:[.,]\d+)*", cell)) == 1, row


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_sentences_have_no_dates_and_no_commits(path):
    """But for those of a command that shows them."""
    sentences = re.sub(r"\(`git show .*?`\)", "", prose(path.read_text()))
    assert not re.search(r"\b20\d\d-\d\d-\d\d\b", sentences)
    assert not re.search(r"\b(?=[a-f0-9]*\d)(?=\d*[a-f])[a-f0-9]{7}\b", sentences)


KNOWN = {"7.06"}  # the loss of guessing, in the note of "SmolLM2, exits"


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("results*.md")), ids=name_of)
def test_numbers_in_the_text_of_the_results_stand_in_a_table_of_the_page(path):
    text = path.read_text()
    found = "\n".join(line for lines in tables(text) for line in lines)
    for number in re.findall(r"\d+\.\d\d+", prose(text)):
        assert number in found or number.rstrip("0") in found or number in KNOWN, number


def test_every_recorded_measurement_says_how_it_was_made():
    for table in RESULTS["lines_of"]("recorded.jsonl"):
        assert table["name"] and table["question"] and table["rows"], table["name"]
        assert all(len(row) == len(table["columns"]) for row in table["rows"]), table["name"]
        own = {"commit", "date"} & set(table["columns"])
        assert own or table["commit"] or table["date"], table["name"]


def test_the_reference_has_every_public_name():
    text = (ROOT / "docs/api.md").read_text()
    entries = re.findall(r"^::: .*?(\w+)$", text, re.MULTILINE)
    configs = re.findall(r"`(\w+Config)`", text)
    listed = {*entries, *configs}
    for module in (hf_descent, early_exit, evaluation):
        assert set(module.__all__) <= listed, set(module.__all__) - listed


# Links and code


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_to_files_lead_to_files(page):
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def python_blocks(page):
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", [page for page in PAGES if python_blocks(page)], ids=name_of)
def test_the_code_of_the_documentation_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {
        "model": bert(),
        "tokenizer": word_tokenizer(),
        "train": classification_data(seed=0),
        "validation": classification_data(seed=1),
        "test": classification_data(seed=2),
    }
    for block in python_blocks(page):
        if "trainer" in block:
            # A new one each time: arguments that a block makes reset accelerate's state.
            names["trainer"] = trained(
                names["model"],
                config("run", descent_alpha="line", initial_loss_bound="auto"),
                train_dataset=names["train"],
                eval_dataset=names["test"],
                processing_class=names["tokenizer"],
            )
        exec(block, names)


def test_the_reference_names_what_exists():
    entries = re.findall(
        r"^::: hf_descent\.(\S+)(?:\n    options: {members: \[([^]]*)\])?",
        (ROOT / "docs/api.md").read_text(),
        re.MULTILINE,
    )
    assert entries
    missing = []
    for path, members in entries:
        found = pydoc.locate(f"hf_descent.{path}")
        if found is None:
            missing.append(path)
            continue
        known = {*dir(found), *getattr(found, "__dataclass_fields__", ())}
        missing += [f"{path}.{name}" for name in members.split(", ") if name not in {"", *known}]
    assert missing == []
