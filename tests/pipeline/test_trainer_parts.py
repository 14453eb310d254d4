"""DescentTrainer together with Trainer's other parts: checkpointing, autocast, search, PEFT, losses of one's own."""

import pytest
import torch
import torch.nn.functional as F
from tiny.data import batches, classification_data, language_data
from tiny.models import bert, gpt2, llama
from tiny.oracles import naive_layer_losses, truncated
from tiny.training import InOrder, config, fitted, watch
from transformers import AlbertConfig, AlbertForSequenceClassification, TrainerCallback

from hf_descent import DescentTrainer, hp_space


DATA = classification_data()
DATA_TEST = classification_data(32, seed=1)


def trained(model, args, data=DATA, trainer_class=DescentTrainer, **given):
    return fitted(trainer_class(model, args, train_dataset=data, **given))


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(tmp_path, reentrant):
    given = {"activation_checkpointing_kwargs": {"use_reentrant": reentrant}}
    one, other = (
        trained(
            bert(),
            config(tmp_path, activation_checkpointing=checkpointing, **given),
            trainer_class=InOrder,
        )
        for checkpointing in (False, True)
    )
    torch.testing.assert_close(one.multipliers.values, other.multipliers.values)
    torch.testing.assert_close(
        other.model.state_dict(), one.model.state_dict(), rtol=1e-4, atol=1e-5
    )


def test_bf16_autocast_follows_full_precision(tmp_path):
    finals = [
        trained(
            bert(), config(tmp_path, bf16=bf16, learning_rate=1e-3), trainer_class=InOrder
        ).multipliers.values
        for bf16 in (False, True)
    ]
    assert finals[1].dtype == torch.float32 and not torch.equal(*finals)
    torch.testing.assert_close(*finals, rtol=0.02, atol=0.005)


def searcher(
    tmp_path, *callbacks, eval_dataset=DATA_TEST, num_layers=3, compute_metrics=None, **arguments
):
    pytest.importorskip("optuna")
    return DescentTrainer(
        args=config(tmp_path, **{"max_steps": 2, **arguments}), model_init=lambda: bert(num_layers=num_layers),
        train_dataset=DATA, eval_dataset=eval_dataset, callbacks=list(callbacks), compute_metrics=compute_metrics,
    )  # fmt: skip


def search(trainer, values):
    """The best trial of a search with one set of values for each."""
    return trainer.hyperparameter_search(
        hp_space=lambda trial: values[trial.number], n_trials=len(values)
    )


def test_hyperparameter_search_starts_each_trial_afresh_and_asks_for_feasible_models_first(
    tmp_path,
):
    begin, starts = watch(
        "on_step_end",
        lambda args, state, given: (state.global_step, trainer.multipliers.steps),
    )
    judge, scores = watch(
        "on_evaluate", lambda args, state, given: given["metrics"]["eval_feasible_score"]
    )
    settings = {
        "max_steps": 20,
        "initial_loss_bound": "auto",
        "eval_strategy": "steps",
        "eval_steps": 20,
    }
    trainer = searcher(
        tmp_path, begin, judge, eval_dataset=DATA, num_layers=2, compute_metrics=lambda _: {"constant": 100.0},
        **settings,
    )  # fmt: skip
    best = trainer.hyperparameter_search(
        hp_space=lambda trial: {
            "descent_alpha": trial.suggest_float("descent_alpha", 0.1, 0.4),
            "dual_learning_rate": trial.suggest_float("dual_learning_rate", 0.01, 0.1),
        },
        n_trials=3,
    )

    assert [steps for step, steps in starts if step == 1] == [
        1.0
    ] * 3  # one dual step each, not 1, 5, 9
    assert len(set(scores)) == 3 and best.objective == max(scores) > -1
    assert 0.1 <= best.hyperparameters["descent_alpha"] <= 0.4

    with pytest.raises(ValueError, match="`direction` is 'minimize'.*to maximize; pass"):
        trainer.hyperparameter_search(direction="minimize", n_trials=1)

    trainer.args.objective = (
        "deep_supervision"  # without constraints the loss counts, which is to fall
    )

    with pytest.raises(ValueError, match="`direction` is 'maximize'.*to minimize; pass"):
        trainer.hyperparameter_search(direction="maximize", n_trials=1)

    trainer.hyperparameter_search(hp_space=hp_space, n_trials=1)

    assert trainer.objective == trainer.state.log_history[-2]["eval_loss"]


def test_trials_of_all_objectives_take_their_dual_steps_and_are_judged_by_their_loss(tmp_path):
    end, steps = watch("on_train_end", lambda *_: trainer.multipliers and trainer.multipliers.steps)
    judge, losses = watch("on_evaluate", lambda args, state, given: given["metrics"]["eval_loss"])
    trainer = searcher(tmp_path, end, judge, objective="erm", eval_strategy="steps", eval_steps=2)
    best = search(trainer, [{"objective": objective} for objective in ("erm", "descent", "erm")])
    assert steps == [None, 2.0, None]
    assert len(losses) == 3 and best.objective == pytest.approx(min(losses))


def test_every_trial_has_the_noise_on_its_own_model(tmp_path):
    judge, losses = watch("on_evaluate", lambda args, state, given: given["metrics"]["eval_loss"])
    trainer = searcher(tmp_path, judge, eval_strategy="steps", eval_steps=2)
    search(trainer, [{"noise_gamma": gamma} for gamma in (2.0, 2.0, 0.0)])
    assert losses[0] == losses[1] != losses[2]


def test_trials_that_share_no_objective_are_refused(tmp_path):
    several = {
        "eval_dataset": {"a": DATA_TEST, "b": DATA_TEST},
        "eval_strategy": "steps",
        "eval_steps": 2,
    }
    for objective in ("erm", "descent"):
        with pytest.raises(ValueError, match=r"several sets \(a, b\).*pass `compute_objective`"):
            search(
                searcher(tmp_path, objective=objective, **several), []
            )  # before there is a trial


def test_a_search_sets_arguments_that_take_several_types(tmp_path):
    values = [
        {"descent_alpha": [0.2, 0.2, 0.2], "exit_targets": {1: 0.5}, "initial_loss_bound": 1.5},
        {"descent_alpha": [0.1, 0.2, 0.3], "exit_targets": {2: 0.1}, "initial_loss_bound": 2.0},
    ]
    begin, seen = watch(
        "on_train_begin", lambda args, *_: {name: getattr(args, name) for name in values[0]}
    )
    given = {"descent_alpha": None, "initial_loss_bound": "auto", "dual_warmup_steps": 1}
    search(searcher(tmp_path, begin, **given), values)
    assert seen == values


def test_auto_find_batch_size_starts_afresh(tmp_path):
    class TooLarge(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if trainer._train_batch_size > 7 and state.global_step == 3:
                raise RuntimeError("CUDA out of memory. Tried to allocate")

    trainer = DescentTrainer(
        bert(),
        config(tmp_path, auto_find_batch_size=True),
        train_dataset=DATA,
        callbacks=[TooLarge()],
    )
    trainer.train()
    assert trainer._train_batch_size == 7 and trainer.multipliers.steps == 6


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("model", [bert, llama])
def test_a_batch_that_is_too_large_to_be_read_is_made_smaller(tmp_path, model, read):
    model = model()
    (head, dims) = (model.classifier, 2) if hasattr(model, "classifier") else (model.lm_head, 3)
    calls = []

    def refuse(module, args):
        calls.append(len(args[0]))
        # In the model's own forward, or only when a layer is read; tiles of positions always fit.
        if len(args[0]) > 7 and args[0].dim() == dims and (not read or len(calls) > 2):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    head.register_forward_pre_hook(refuse)
    data = DATA if model.config.model_type == "bert" else language_data()
    trainer = trained(model, config(tmp_path, auto_find_batch_size=True, max_steps=2), data)

    assert trainer._train_batch_size == 7 and trainer.state.global_step == 2


def test_lora_trains_adapters_and_head_only(tmp_path):
    peft = pytest.importorskip("peft")
    base = bert()
    lora = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
    before = {name: parameter.clone() for name, parameter in base.named_parameters()}
    trainer = trained(peft.get_peft_model(base, lora), config(tmp_path, noise_gamma=0.3))
    trainer.save_model()

    assert trainer.multipliers.values.max() > 0

    for name, parameter in trainer.model.get_base_model().named_parameters():
        if "lora" in name or "modules_to_save" in name:
            continue
        origin = name.replace("base_layer.", "").replace("original_module.", "")
        assert torch.equal(parameter, before[origin]), name

    loaded = peft.PeftModel.from_pretrained(bert(), str(tmp_path)).eval()
    batch = next(batches(DATA))
    torch.testing.assert_close(loaded(**batch).logits, trainer.model.eval()(**batch).logits)


def first_token(model, hidden, inputs):
    return model.classifier(hidden[:, 0])


def token_mean(model, hidden, inputs):
    mask = inputs["attention_mask"][..., None].to(hidden.dtype)
    return model.classifier((hidden * mask).sum(1) / mask.sum(1))


@pytest.mark.parametrize("readout", [first_token, token_mean])
def test_a_readout_of_ones_own_scores_every_layer_and_gives_the_predictions(tmp_path, readout):
    trainer = trained(bert(), config(tmp_path), eval_dataset=DATA_TEST, readout=readout)
    metrics = trainer.evaluate()
    batch = next(batches(DATA_TEST, 32))
    model = trainer.model.eval()

    with torch.no_grad():
        outputs = model.bert(batch["input_ids"], batch["attention_mask"], output_hidden_states=True)
        logits = [readout(model, hidden, batch) for hidden in outputs.hidden_states[1:]]

    losses = [F.cross_entropy(logit, batch["labels"]).item() for logit in logits]

    assert [metrics[f"eval_layer_loss_{layer}"] for layer in (1, 2, 3)] == pytest.approx(
        losses, rel=1e-5
    )
    assert metrics["eval_loss"] == pytest.approx(losses[-1], rel=1e-5)

    unlabelled = [
        {name: value for name, value in row.items() if name != "labels"} for row in DATA_TEST
    ]

    for data in (DATA_TEST, unlabelled):
        torch.testing.assert_close(
            torch.tensor(trainer.predict(data).predictions), logits[-1], rtol=1e-4, atol=1e-5
        )


def test_a_readout_of_ones_own_computes_in_mixed_precision_as_the_model_s_own(tmp_path):
    """ALBERT's layers give bfloat16 there, which a float32 head could not take."""

    def head(model, hidden, inputs):
        return model.classifier(torch.tanh(model.albert.pooler(hidden[:, 0])))

    torch.manual_seed(0)
    sizes = {
        "embedding_size": 8,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    model = AlbertForSequenceClassification(
        AlbertConfig(vocab_size=40, num_hidden_layers=2, num_labels=3, **sizes)
    )
    own, replayed = (
        DescentTrainer(
            model, config(tmp_path, bf16=True, max_steps=1), train_dataset=DATA, **readout
        )
        for readout in ({"readout": head}, {})
    )

    assert (
        own.evaluate(DATA_TEST)["eval_layer_loss_1"]
        == replayed.evaluate(DATA_TEST)["eval_layer_loss_1"]
    )

    own.train()


def test_a_layer_loss_reads_attributes_or_keys(tmp_path):
    """The "auto" settings call it on outputs of their own."""

    def losses(logits_of):
        def loss(outputs, labels, num_items_in_batch=None):
            return F.cross_entropy(logits_of(outputs), labels)

        args = config(tmp_path, max_steps=3, initial_loss_bound="auto", dual_warmup_steps=1)
        return [
            log["loss"]
            for log in trained(bert(), args, layer_loss_fn=loss).state.log_history
            if "loss" in log
        ]

    own = losses(lambda outputs: outputs.logits)

    assert len(own) == 3 and own == losses(lambda outputs: outputs["logits"])


def test_a_layer_loss_of_ones_own_scores_every_layer(tmp_path):
    weight = torch.tensor([1.0, 3.0, 0.5])

    def weighted(outputs, labels, num_items_in_batch=None):
        return F.cross_entropy(outputs["logits"], labels, weight)

    metrics = DescentTrainer(
        bert(), config(tmp_path), eval_dataset=DATA_TEST, layer_loss_fn=weighted
    ).evaluate()
    batch = next(batches(DATA_TEST, 32))

    for layer in (1, 2, 3):
        with torch.no_grad():
            logits = (
                truncated(bert(), layer).eval()(batch["input_ids"], batch["attention_mask"]).logits
            )
        # A weighted mean over all rows, whatever the size of the batches.
        expected = F.cross_entropy(logits, batch["labels"], weight).item()
        assert metrics[f"eval_layer_loss_{layer}"] == pytest.approx(expected, rel=1e-5)

    with pytest.raises(ValueError, match="not both"):
        DescentTrainer(bert(), config(tmp_path), layer_loss_fn=weighted, compute_loss_func=weighted)


@pytest.mark.parametrize("objective", ["hinge", "quadratic"])
def test_penalties_are_taken_on_the_mean_losses_of_a_micro_batch(tmp_path, objective):
    """One SGD step of the penalised model equals a step on the penalty written out; empty micro-batches are zero."""
    args = config(
        tmp_path, objective=objective, penalty_coefficient=2.0, descent_alpha=0.4, max_steps=1, optim="sgd",
        learning_rate=0.5, max_grad_norm=0.0,
    )  # fmt: skip
    trainer = trained(bert(), args, trainer_class=InOrder)
    model = bert()
    f = naive_layer_losses(model, next(batches(DATA)))
    excess = (f - 0.6 * torch.cat([torch.ones(1), f[:-1]])).clamp(min=0)
    (f[-1] + 2 * (excess.sum() if objective == "hinge" else excess.square().sum() / 2)).backward()

    for (name, a), b in zip(trainer.model.named_parameters(), model.parameters()):
        torch.testing.assert_close(a, b - 0.5 * b.grad, rtol=1e-4, atol=1e-6, msg=name)

    data = language_data(8, ragged=False)
    data[3]["labels"] = torch.full_like(data[3]["labels"], -100)
    parts = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}
    trainer = trained(
        llama(), config(tmp_path, objective=objective, max_steps=1, **parts), data, InOrder
    )

    assert all(torch.isfinite(parameter).all() for parameter in trainer.model.parameters())


def test_robustness_is_scored_by_the_trainer_s_own_loss(tmp_path):
    args = config(tmp_path, label_smoothing_factor=0.2, eval_gammas=[0.0, 1.0], noise_gamma=0.5)
    trainer = trained(bert(), args, eval_dataset=DATA_TEST)
    curve = trainer.evaluate_robustness()
    assert curve.gamma_train == 0.5
    assert curve.losses[0, 0] == pytest.approx(trainer.evaluate()["eval_loss"], rel=1e-5)
    assert any(key.startswith("eval_accuracy") for log in trainer.state.log_history for key in log)
    with pytest.raises(ValueError, match="eval_gammas"):
        DescentTrainer(bert(), config(tmp_path), eval_dataset=DATA_TEST).evaluate_robustness()


def test_noise_with_persistent_workers_does_not_evaluate_on_the_training_data(tmp_path):
    args = config(
        tmp_path,
        noise_gamma=0.5,
        dataloader_num_workers=1,
        dataloader_persistent_workers=True,
        max_steps=2,
    )
    trainer = trained(bert(), args, eval_dataset=DATA_TEST[:8])
    assert trainer.num_examples(trainer.get_eval_dataloader()) == 8


def test_the_label_shift_is_the_model_s_own_not_its_name_s(tmp_path):
    """GPT2LMHeadModel shifts its labels; the items of the first step already count so."""
    model = gpt2()
    data = language_data()
    parts = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}
    trainer = trained(
        model, config(tmp_path, learning_rate=0.0, max_steps=2, **parts), data, InOrder
    )
    logged = [log["loss"] for log in trainer.state.log_history if "grad_norm" in log]
    for loss, rows in zip(logged, (data[:8], data[8:16]), strict=True):
        batch = {name: torch.stack([row[name] for row in rows]) for name in data[0]}
        with torch.no_grad():
            assert loss == pytest.approx(model(**batch).loss.item(), rel=1e-5)
