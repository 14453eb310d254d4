import pytest
import torch
import torch.nn.functional as F
from tiny.models import SIZES
from tiny.oracles import pool
from transformers import AlbertConfig, AutoModel, BertConfig, DistilBertConfig, RobertaConfig

from hf_descent import layer_logits
from hf_descent.models import LinearReadoutConfig, LinearReadoutForSequenceClassification


TEXT = SIZES | {"num_hidden_layers": 3, "vocab_size": 40}
ENCODERS = {
    "bert": BertConfig(**TEXT),
    "roberta": RobertaConfig(**TEXT, pad_token_id=1),
    "albert": AlbertConfig(**TEXT, embedding_size=8),
    "distilbert": DistilBertConfig(vocab_size=40, dim=16, hidden_dim=32, n_heads=2, n_layers=3),
}


def build(name="bert", pooling="cls", **kwargs):
    torch.manual_seed(0)
    config = LinearReadoutConfig(
        encoder_config=ENCODERS[name], pooling=pooling, num_labels=3, **kwargs
    )
    return LinearReadoutForSequenceClassification(config).eval()


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 40, (4, 7), generator=generator)
    mask = torch.ones_like(ids)
    ids[1, 4:], mask[1, 4:] = 1, 0
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([0, 2, 1, 2])}


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("name", ENCODERS)
def test_logits_are_one_linear_map_of_every_layers_hidden_states(inputs, name, pooling):
    model = build(name, pooling)
    with torch.no_grad():
        hidden = model.encoder(
            inputs["input_ids"], inputs["attention_mask"], output_hidden_states=True
        ).hidden_states
        expected = [
            F.linear(
                pool(states, inputs["attention_mask"], pooling),
                model.classifier.weight,
                model.classifier.bias,
            )
            for states in hidden[1:]
        ]
        outputs, logits = model(**inputs), layer_logits(model, inputs)
    torch.testing.assert_close(outputs.logits, expected[-1])
    torch.testing.assert_close(outputs.loss, F.cross_entropy(expected[-1], inputs["labels"]))
    torch.testing.assert_close(logits, expected)
    model(**inputs).loss.backward()
    assert [name for name, weight in model.named_parameters() if weight.grad is None] == []


def test_padding_does_not_count_and_items_and_token_types_do(inputs):
    model = build(pooling="mean")
    alone = {name: value[1:2, :4] for name, value in inputs.items() if name != "labels"}
    types = torch.zeros_like(inputs["input_ids"])
    with torch.no_grad():
        outputs = model(**inputs)
        torch.testing.assert_close(model(**alone).logits, outputs.logits[1:2])
        unmasked = model(inputs["input_ids"]).logits
        torch.testing.assert_close(unmasked[[0, 2, 3]], outputs.logits[[0, 2, 3]])
        torch.testing.assert_close(
            model(**inputs, num_items_in_batch=torch.tensor(16)).loss, outputs.loss * 4 / 16
        )
        assert torch.equal(model(**inputs, token_type_ids=types).logits, outputs.logits)
        types[:, 3:] = 1
        assert not torch.allclose(model(**inputs, token_type_ids=types).logits, outputs.logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_from_encoder_keeps_the_pretrained_weights(inputs, tmp_path, dtype):
    torch.manual_seed(1)
    encoder = AutoModel.from_config(ENCODERS["bert"]).to(dtype).eval()
    encoder.save_pretrained(tmp_path)
    model = LinearReadoutForSequenceClassification.from_encoder(
        str(tmp_path), pooling="mean", num_labels=3
    )
    assert (model.config.num_labels, model.config.pooling, model.training) == (3, "mean", False)
    with torch.no_grad():
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        assert torch.equal(model.encoder(ids, mask)[0], encoder(ids, mask)[0])
        assert model(ids, mask).logits.dtype == dtype
    assert not list(model.encoder.pooler.parameters())
