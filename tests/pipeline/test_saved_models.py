"""A model that is saved is the model that was measured, whatever reads its layers, and wherever it is saved."""

import json
import subprocess
import sys

import pytest
import torch
from tiny.data import classification_data
from tiny.models import VOCAB, bert
from tiny.training import config, fitted, trained
from transformers import (
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    BartConfig,
    BartForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LayoutLMConfig,
    LayoutLMForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
    Trainer,
    TrainerCallback,
    ViTConfig,
    ViTForImageClassification,
    set_seed,
)

from hf_descent import DescentObjective, DescentTrainer, cli, layer_logits
from hf_descent.configs import DescentArguments
from hf_descent.early_exit import truncate
from hf_descent.hub.facts import collect


TEXTS = classification_data(32)
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
}
NAMES = {"id2label": {0: "no", 1: "yes", 2: "maybe"}, "label2id": {"no": 0, "yes": 1, "maybe": 2}}


def distilbert():
    sizes = {"dim": 16, "hidden_dim": 32, "n_heads": 2, "n_layers": 3}
    return DistilBertForSequenceClassification(DistilBertConfig(vocab_size=VOCAB, **sizes, **NAMES))


def roberta():
    return RobertaForSequenceClassification(
        RobertaConfig(vocab_size=VOCAB, pad_token_id=0, **SIZES, **NAMES)
    )


def gpt2():
    """A decoder, whose head has no bias, and with a norm behind its last layer."""
    sizes = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 16}
    return GPT2ForSequenceClassification(GPT2Config(**sizes, **NAMES, pad_token_id=0))


def vit():
    return ViTForImageClassification(
        ViTConfig(image_size=4, patch_size=2, num_channels=1, **SIZES, **NAMES)
    )


def numbered(name, *shape):
    generator = torch.Generator().manual_seed(0)
    return [
        {name: torch.randn(*shape, generator=generator), "labels": index % 3} for index in range(24)
    ]


MODELS = {
    "bert": (lambda: bert(**NAMES), TEXTS, AutoModelForSequenceClassification),
    "distilbert": (distilbert, TEXTS, AutoModelForSequenceClassification),
    "roberta": (roberta, TEXTS, AutoModelForSequenceClassification),
    "gpt2": (gpt2, TEXTS, AutoModelForSequenceClassification),
    "vit": (vit, numbered("pixel_values", 1, 4, 4), AutoModelForImageClassification),
}


def batch_of(rows):
    return {
        name: torch.stack([torch.as_tensor(row[name]) for row in rows])
        for name in rows[0]
        if name != "labels"
    }


def logits_of(model, rows):
    with torch.no_grad():
        return model.eval()(**batch_of(rows)).logits


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("name", MODELS)
def test_a_ready_made_readout_is_saved_as_it_was_measured(tmp_path, name, pooling):
    build, data, auto_class = MODELS[name]
    set_seed(0)
    model = build()
    trainer = trained(
        model, config(tmp_path), train_dataset=data, eval_dataset=data, readout=pooling
    )
    measured = torch.tensor(trainer.predict(data).predictions)
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model(tmp_path / "trainer")
    model.save_pretrained(
        tmp_path / "script"
    )  # what the script holds is the model that was trained

    for folder in ("trainer", "script"):
        saved = auto_class.from_pretrained(tmp_path / folder)
        torch.testing.assert_close(logits_of(saved, data), measured)
        assert saved.config.id2label == NAMES["id2label"]

    labels = torch.tensor([row["labels"] for row in data])

    assert loss == pytest.approx(
        torch.nn.functional.cross_entropy(logits_of(saved, data), labels).item(), rel=1e-5
    )

    cut = truncate(model, 2, batch_of(data))

    with torch.no_grad():
        read = layer_logits(model, batch_of(data))[1]

    torch.testing.assert_close(logits_of(cut, data), read)
    cut.save_pretrained(tmp_path / "cut")
    torch.testing.assert_close(logits_of(auto_class.from_pretrained(tmp_path / "cut"), data), read)


@pytest.mark.slow
def test_a_fresh_process_loads_it_without_remote_code(tmp_path):
    set_seed(0)
    trainer = trained(bert(), config(tmp_path), train_dataset=TEXTS, readout="mean")
    trainer.save_model()
    measured = trainer.predict(TEXTS[:4]).predictions
    torch.save(batch_of(TEXTS[:4]), tmp_path / "batch.pt")
    script = """
import json, sys, torch
import hf_descent.models
from transformers import AutoModelForSequenceClassification
model = AutoModelForSequenceClassification.from_pretrained(sys.argv[1])
print(json.dumps(model(**torch.load(sys.argv[1] + "/batch.pt")).logits.tolist()))
"""
    run = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True
    )
    loaded = json.loads(run.stdout.strip().splitlines()[-1])
    torch.testing.assert_close(torch.tensor(loaded), torch.tensor(measured))


def test_checkpoints_the_best_model_and_a_resumed_run_have_the_readout(tmp_path):
    def run(folder, **settings):
        return DescentTrainer(
            None,
            config(tmp_path / folder, save_strategy="steps", save_steps=3, **settings),
            model_init=lambda: bert(),
            train_dataset=TEXTS,
            eval_dataset=TEXTS,
            readout="mean",
        )

    best = {"eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True}
    whole = fitted(run("whole", **best))
    by_step = {
        entry["step"]: entry["eval_loss"]
        for entry in whole.state.log_history
        if "eval_loss" in entry
    }
    labels = torch.tensor([row["labels"] for row in TEXTS])

    for step, loss in by_step.items():
        folder = tmp_path / "whole" / f"checkpoint-{step}"
        saved = AutoModelForSequenceClassification.from_pretrained(folder)
        own = torch.nn.functional.cross_entropy(logits_of(saved, TEXTS), labels).item()
        assert own == pytest.approx(loss, rel=1e-5)

    assert whole.evaluate()["eval_loss"] == pytest.approx(min(by_step.values()), rel=1e-6)

    resumed = fitted(run("whole"), tmp_path / "whole" / "checkpoint-3")
    straight = fitted(run("straight"))

    for own, other in zip(resumed.model.parameters(), straight.model.parameters(), strict=True):
        assert torch.equal(own, other)


def test_the_card_of_a_ready_made_readout_has_its_numbers_and_the_code_that_loads_it(tmp_path):
    trainer = trained(
        bert(), config(tmp_path), train_dataset=TEXTS, eval_dataset=TEXTS, readout="mean"
    )
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    trainer.create_model_card()
    summary = json.loads((tmp_path / "descent_config.json").read_text())
    assert summary["pooling"] == "mean" and "readout" not in summary
    text = (tmp_path / "README.md").read_text()
    assert f"{loss:.4g}" in text and "custom readout" not in text
    assert "import hf_descent.models" in text


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (
            lambda: BartForSequenceClassification(
                BartConfig(
                    vocab_size=VOCAB,
                    d_model=16,
                    encoder_layers=2,
                    decoder_layers=2,
                    encoder_attention_heads=2,
                    decoder_attention_heads=2,
                    num_labels=3,
                )
            ),
            "has an encoder and a decoder",
        ),
        (
            lambda: LayoutLMForSequenceClassification(LayoutLMConfig(**SIZES, vocab_size=VOCAB)),
            "reads bbox, too",
        ),
    ],
)
def test_what_a_linear_readout_could_not_hold_is_refused_before_training(tmp_path, build, match):
    model = build()
    kind = type(model)
    with pytest.raises(ValueError, match=match):
        DescentTrainer(model, config(tmp_path), train_dataset=TEXTS, readout="mean")
    assert type(model) is kind


def test_a_checkpoint_of_a_readout_that_was_not_saved_is_not_resumed(tmp_path):
    checkpoint = tmp_path / "checkpoint-3"
    bert().save_pretrained(checkpoint)
    (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": 3}))
    (checkpoint / "descent_config.json").write_text(json.dumps({"readout": "mean"}))
    trainer = DescentTrainer(bert(), config(tmp_path), train_dataset=TEXTS, readout="mean")
    with pytest.raises(ValueError, match="before that became a part of the model"):
        trainer.train(resume_from_checkpoint=str(checkpoint))


def test_a_loop_of_ones_own_trains_the_readout_that_is_saved(tmp_path):
    model = bert()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batches = [dict(batch_of(TEXTS), labels=torch.tensor([row["labels"] for row in TEXTS]))]
    arguments = DescentArguments(initial_loss_bound=2.0)
    objective = DescentObjective(model, batches, arguments, max_steps=3, readout="mean")

    for batch in 3 * batches:
        objective(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        objective.step()

    with torch.no_grad():
        outputs = model.eval()(**batches[0], output_hidden_states=True)
    last = outputs.hidden_states[-1]  # [batch, seq, hidden]

    mask = batches[0]["attention_mask"][..., None]
    pooled = (last * mask).sum(1) / mask.sum(1)
    model.save_pretrained(tmp_path)
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    torch.testing.assert_close(logits_of(saved, TEXTS), model.classifier(pooled).detach())


def second_token(model, hidden, inputs):
    return model.classifier(hidden[:, 1])


def test_numbers_of_a_readout_that_is_not_saved_are_not_published(tmp_path, caplog):
    trainer = trained(
        bert(), config(tmp_path), train_dataset=TEXTS, eval_dataset=TEXTS, readout=second_token
    )
    loss = trainer.evaluate()["eval_loss"]
    profile = trainer.evaluate_layers()
    trainer.evaluate_robustness(gammas=[0.0, 1.0])
    caplog.clear()
    trainer.save_model()

    assert (
        "`second_token` is not saved with the model. A loaded model uses its own head"
        in caplog.text
    )

    caplog.clear()
    truncate(trainer.model, 2)

    assert "was trained with the readout `second_token`" in caplog.text

    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    caplog.clear()
    truncate(saved, 2)

    assert "was trained with the readout `second_token`" in caplog.text

    caplog.clear()
    trainer.create_model_card()  # as `push_to_hub` does

    assert "the card gives no number that it measured" in caplog.text

    for text in ((tmp_path / "README.md").read_text(), (tmp_path / "model_card.json").read_text()):
        assert f"{loss:.4g}" not in text and f"{profile.losses[-1]:.4g}" not in text
        assert "second_token" in text

    # Files of measurements in the folder do not change that.
    profile.to_json(str(tmp_path / "layer_profile.json"))
    (tmp_path / "eval_results.json").write_text(json.dumps({"eval_accuracy": 0.92}))
    cli.main(["card", str(tmp_path)])

    assert "0.92" not in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize("readout", [second_token, "mean"])
def test_a_folder_with_numbers_of_a_readout_that_is_not_saved_is_not_pushed(
    tmp_path, monkeypatch, readout
):
    pushed = []
    monkeypatch.setattr(Trainer, "push_to_hub", lambda self, *words: pushed.append(words))
    trainer = trained(
        bert(), config(tmp_path), train_dataset=TEXTS, eval_dataset=TEXTS, readout=readout
    )
    trainer.save_model()
    trainer.save_metrics("train", {"train_loss": 1.0})
    trainer.push_to_hub("numbers of training")
    trainer.save_metrics("eval", trainer.evaluate())
    if readout == "mean":
        trainer.push_to_hub("numbers that the model has")
        assert len(pushed) == 2
        return

    with pytest.raises(ValueError, match=r"`second_token` measured \(all_results.json, eval_res"):
        trainer.push_to_hub("numbers that it does not have")

    assert pushed == [("numbers of training",)]


def test_a_readout_that_only_measures_is_not_published_either(tmp_path):
    trainer = DescentTrainer(bert(), config(tmp_path), eval_dataset=TEXTS, readout=second_token)
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    trainer.create_model_card()
    text = (tmp_path / "README.md").read_text()
    assert f"{loss:.4g}" not in text and "second_token" in text
    own = DescentTrainer(bert(), config(tmp_path), eval_dataset=TEXTS)
    loss = own.evaluate()["eval_loss"]
    own.create_model_card()
    text = (tmp_path / "README.md").read_text()
    assert f"{loss:.4g}" in text and "second_token" not in text


def test_a_training_without_the_readout_takes_its_name_from_the_model(tmp_path):
    model = bert()
    trained(model, config(tmp_path), train_dataset=TEXTS, readout=second_token)
    assert model.config.custom_readout == "second_token"
    trained(model, config(tmp_path), train_dataset=TEXTS)
    assert not hasattr(model.config, "custom_readout")


def test_numbers_of_earlier_weights_are_not_published(tmp_path, caplog):
    data = {"train_dataset": TEXTS, "eval_dataset": TEXTS}
    trainer = DescentTrainer(bert(), config(tmp_path), **data)

    class EvaluateOnce(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_evaluate = state.global_step == 2

    trainer.add_callback(EvaluateOnce())
    trainer.train()
    trainer.save_model()
    trainer.create_model_card()

    assert "was after step 2, and the model is that after step 6" in caplog.text
    assert not collect(tmp_path).get("evaluation") and not collect(tmp_path).get("verdict")

    loss = trainer.evaluate()["eval_loss"]
    trainer.create_model_card()

    assert collect(tmp_path)["evaluation"]["eval_loss"] == loss and collect(tmp_path)["verdict"]


def test_a_custom_loss_is_named_on_the_card(tmp_path):
    def focal(outputs, labels, num_items_in_batch=None):
        losses = torch.nn.functional.cross_entropy(outputs["logits"], labels, reduction="none")
        return ((1 - (-losses).exp()) * losses).mean()

    trainer = trained(
        bert(), config(tmp_path), train_dataset=TEXTS, eval_dataset=TEXTS, layer_loss_fn=focal
    )
    trainer.evaluate()
    trainer.save_model()
    trainer.create_model_card()
    text = (tmp_path / "README.md").read_text()
    assert "training and evaluation are those of `focal`, which is not saved" in text
