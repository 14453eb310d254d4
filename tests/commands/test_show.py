"""The page in a real browser, against truncated models; that test is skipped where there is none."""

import configparser
import runpy
import shutil
import socket
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import yaml
from tiny.models import bert, llama, spread
from tiny.tokenizers import tokenizer, word_tokenizer

from hf_descent import EmbeddingNoise, cli
from hf_descent.commands.show import DRAWS, build
from hf_descent.early_exit import ConfidenceExit, ConfidenceReport, truncate


CHROMIUM = shutil.which("chromium")
FLAGS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
FLAGS += " --disable-component-update --disable-sync"
LABELS = {0: "good", 1: "<i>bad</i>", 2: "${so} {{so}}"}
SPACE = Path(__file__).parents[2] / "recipes" / "space"
COLUMNS = ["layer", "predictions", "uncertainty"]
NOISY_COLUMNS = ["kept under noise", "mean predictions under noise"]


@contextmanager
def browsing(page, monkeypatch):
    """The page in a browser, once it is there; no socket of this process and no request leaves the machine."""
    playwright = pytest.importorskip("playwright.sync_api")
    connect = socket.socket.connect

    def local_connect(self, address):
        assert self.family == socket.AF_UNIX or address[0] in ("127.0.0.1", "localhost", "::1"), (
            address
        )
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", local_connect)
    _, url, _ = page.launch(prevent_thread_lock=True, quiet=True)
    try:
        with playwright.sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS.split())
            tab, requests = browser.new_page(), []
            tab.on("request", lambda request: requests.append(request.url))
            tab.goto(url)
            tab.get_by_label("Text").wait_for()
            yield tab
            browser.close()
        assert requests and all(
            request.startswith((url, "data:", "blob:")) for request in requests
        ), requests
    finally:
        page.close()


def shown(tab, summary):
    """Columns of the table by their titles, and the marked layer, once the sentence above it begins with `summary`."""
    tab.get_by_text(summary).wait_for()
    titles = tab.locator("th").all_inner_texts()
    rows = [row.locator("td").all_inner_texts() for row in tab.locator("tbody tr").all()]
    (marked,) = tab.locator("tr.exit td:first-child").all_inner_texts()
    return dict(zip(titles, zip(*rows))), int(marked)


def set_slider(tab, label, value):
    box = tab.get_by_label(f"number input for {label}")
    box.fill(str(value))
    box.press("Enter")


def predictions(probabilities, names):
    shares, numbers = probabilities.topk(3)
    return ", ".join(
        f"{names(number)} {share:.1%}" for share, number in zip(shares.tolist(), numbers.tolist())
    )


def truncated_logits(model, inputs, gamma=0.0, draw=0):
    """The logits `[layers, ...]` of models that end after layer 1, 2, ..., each under the same noise."""
    found = []
    for layer in range(1, model.config.num_hidden_layers + 1):
        short = truncate(model, layer)
        with torch.no_grad(), EmbeddingNoise(short, gamma, seed=0).at(gamma, draw):
            found.append(short(**inputs).logits)
    return torch.stack(found)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium")
@pytest.mark.parametrize("kind", ["classifier", "language model"])
def test_the_page_shows_what_models_that_stop_early_predict(kind, monkeypatch):
    pytest.importorskip("gradio")
    if kind == "classifier":
        model, tok, text = (
            spread(bert(num_layers=3, id2label=LABELS)),
            word_tokenizer(),
            "w1 w2 w9 w30",
        )
        names = LABELS.get
    else:
        tok, text = tokenizer(chat=False), "hello"
        model = spread(llama(num_layers=3, vocab_size=len(tok)))
        names = lambda number: repr(tok.decode([number]))  # noqa: E731
    inputs = dict(tok(text, return_tensors="pt"))

    def logits_of(**noise):
        logits = truncated_logits(model, inputs, **noise)
        return logits[:, 0] if kind == "classifier" else logits[:, 0, -1]  # [layers, classes]

    clean = logits_of()
    unsure = (
        torch.distributions.Categorical(logits=clean).entropy()
        / torch.tensor(float(clean.shape[1])).log()
    )
    threshold = round(unsure[1].item() + 0.01, 2)  # at which layer 2 is sure
    exit_layer = 1 + (unsure < threshold).int().argmax().item()
    with browsing(build(model, tok, threshold), monkeypatch) as tab:
        tab.get_by_label("Text").fill(text)
        tab.get_by_label("Text").press("Enter")
        table, marked = shown(tab, f"Exit after layer {exit_layer} of 3.")
        assert list(table) == COLUMNS and table["layer"] == ("1", "2", "3") and marked == exit_layer
        assert table["predictions"] == tuple(predictions(each.softmax(-1), names) for each in clean)
        assert table["uncertainty"] == tuple(f"{each:.3f}" for each in unsure)
        if kind == "classifier":
            assert ConfidenceExit(model, threshold)(**inputs).exit_layers.tolist() == [marked]

        set_slider(tab, "Exit once the uncertainty is below", 0)
        assert shown(tab, "Exit after layer 3 of 3.")[1] == 3
        set_slider(tab, "Noise on the embeddings (gamma)", 1.5)
        table, _ = shown(tab, "Under noise after layers 3 to 3.")
        noisy = torch.stack(
            [logits_of(gamma=1.5, draw=draw) for draw in range(DRAWS)]
        )  # [draws, layers, classes]
        kept = (noisy.argmax(-1) == clean.argmax(-1)).sum(0)
        assert list(table) == COLUMNS + NOISY_COLUMNS and 0 < kept.sum() < 3 * DRAWS
        assert table[NOISY_COLUMNS[0]] == tuple(f"{count} of {DRAWS}" for count in kept)
        assert table[NOISY_COLUMNS[1]] == tuple(
            predictions(each, names) for each in noisy.softmax(-1).mean(0)
        )

        tab.get_by_label("Text").fill("w " * 200)
        tab.get_by_label("Text").press("Enter")
        tab.get_by_text("the model takes 1 to").wait_for()


def test_models_that_it_cannot_show_are_refused_before_the_page_opens(monkeypatch):
    pytest.importorskip("gradio")
    with pytest.raises(ValueError, match="several labels a sample"):
        build(bert(problem_type="multi_label_classification"), word_tokenizer())
    with pytest.raises(ValueError, match="1 output; give a model of two classes"):
        build(bert(num_labels=1), word_tokenizer())


def test_without_gradio_it_says_how_to_install_it(tmp_path, monkeypatch, capsys):
    bert().save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    monkeypatch.setitem(sys.modules, "gradio", None)
    monkeypatch.setattr(sys, "argv", ["hf-descent", "show", str(tmp_path)])
    with pytest.raises(SystemExit):
        cli.console()
    assert "`pip install 'hf_descent[show]'`" in capsys.readouterr().err


def test_it_begins_with_the_threshold_that_was_calibrated(tmp_path, monkeypatch):
    gradio = pytest.importorskip("gradio")
    bert().save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    ConfidenceReport(0.69, 0.7, [0.5, 0.25, 0.25], 2.0, 0.37, 8).to_json(
        tmp_path / "confidence_exit.json"
    )
    pages = []
    monkeypatch.setattr(
        gradio.Blocks, "launch", lambda self, server_port: pages.append((self, server_port))
    )
    cli.main(["show", str(tmp_path), "--port", "7999"])
    ((page, port),) = pages
    assert port == 7999 and 0.37 in [
        getattr(block, "value", None) for block in page.blocks.values()
    ]


def test_the_space_has_the_same_page_and_the_package_s_requirements(tmp_path, monkeypatch):
    setup = configparser.ConfigParser()
    setup.read(SPACE.parents[1] / "setup.cfg")
    needed = setup["options"]["install_requires"].split()
    needed += setup["options.extras_require"]["commands"].split()
    assert (SPACE / "requirements.txt").read_text().split() == sorted(needed)
    header = yaml.safe_load((SPACE / "README.md").read_text().split("---\n")[1])
    assert header["sdk"] == "gradio" and (SPACE / header["app_file"]).is_file()
    gradio = pytest.importorskip("gradio")
    bert().save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    monkeypatch.setenv("MODEL", str(tmp_path))
    demo = runpy.run_path(str(SPACE / "app.py"))["demo"]
    assert isinstance(demo, gradio.Blocks) and not demo.analytics_enabled
