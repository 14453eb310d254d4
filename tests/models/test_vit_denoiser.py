import pytest
import torch
import torch.nn.functional as F
from test_all_models import batch_of
from transformers import (
    CLIPVisionConfig,
    DeiTConfig,
    Dinov2Config,
    DINOv3ViTConfig,
    PixtralVisionConfig,
    SiglipVisionConfig,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
    YolosConfig,
)

from hf_descent import layer_logits, layer_losses
from hf_descent.models import ViTDenoiserConfig, ViTForDenoising


SIZES = {
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 16,
    "patch_size": 4,
}


def encoder(kind=ViTConfig, **config):
    return kind(**{**SIZES, "hidden_size": 48, "num_channels": 3, **config})


def tiny(encoder_config=None, **config):
    torch.manual_seed(0)
    return ViTForDenoising(
        ViTDenoiserConfig(encoder_config=encoder_config or encoder(), **config)
    ).eval()


def to_image(tokens):
    """Tokens `[16, 48]` of one 16x16 image, laid out pixel by pixel."""
    image = torch.empty(3, 16, 16)
    for index, token in enumerate(tokens):
        for place, value in enumerate(token):
            channel, row, column = place // 16, place % 16 // 4, place % 4
            image[channel, index // 4 * 4 + row, index % 4 * 4 + column] = value
    return image


@pytest.mark.parametrize(
    "kind",
    [ViTConfig, DeiTConfig, Dinov2Config, DINOv3ViTConfig, CLIPVisionConfig, SiglipVisionConfig],
)
def test_every_layers_tokens_are_read_as_the_patches_of_an_image(kind):
    model, batch = tiny(encoder(kind)), batch_of("vit", 4)
    outputs = model(**batch, output_hidden_states=True)
    assert len(outputs.hidden_states) == 4
    for state, logits in zip(outputs.hidden_states[1:], layer_logits(model, batch)):
        torch.testing.assert_close(
            logits, torch.stack([to_image(tokens[-16:]) for tokens in state])
        )
    torch.testing.assert_close(layer_logits(model, batch)[-1], outputs.logits)
    expected = sum((x - y).square().sum() / 2 for x, y in zip(outputs.logits, batch["labels"])) / 4
    torch.testing.assert_close(outputs.loss, expected)
    torch.testing.assert_close(layer_losses(model, batch)[-1], expected)
    outputs.loss.backward()
    unused = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert unused <= {"encoder.embeddings.mask_token"}


def test_images_may_be_oblong():
    model, pixels = tiny(encoder(image_size=[8, 16])), torch.randn(2, 3, 8, 16)
    outputs = model(pixels, output_hidden_states=True)
    tokens = outputs.hidden_states[-1][:, -8:]
    torch.testing.assert_close(outputs.logits, F.fold(tokens.mT, (8, 16), 4, stride=4))


def test_linear_readout_is_shared_by_the_layers():
    model, batch = tiny(encoder(hidden_size=32), readout="linear"), batch_of("vit", 4)
    outputs = model(**batch, output_hidden_states=True)
    for state, logits in zip(outputs.hidden_states[1:], layer_logits(model, batch)):
        torch.testing.assert_close(logits[0], to_image(model.readout(state)[0, -16:]))


def test_a_linear_readout_has_the_precision_of_its_encoder(tmp_path):
    ViTModel(encoder(hidden_size=32)).bfloat16().save_pretrained(tmp_path)
    model = ViTForDenoising.from_encoder(tmp_path, readout="linear")
    assert model(batch_of("vit", 4)["pixel_values"].bfloat16()).logits.dtype == torch.bfloat16


def test_a_pretrained_classifier_gives_its_encoder(tmp_path):
    torch.manual_seed(1)
    classifier = ViTForImageClassification(encoder()).eval()
    classifier.save_pretrained(tmp_path / "vit")
    model = ViTForDenoising.from_encoder(tmp_path / "vit", loss_scale=2.0)
    assert not model.training
    images = batch_of("vit", 4)["pixel_values"]
    states = classifier(images, output_hidden_states=True).hidden_states
    tokens = model(images, output_hidden_states=True).hidden_states
    torch.testing.assert_close(tokens, states)
    assert not isinstance(model.encoder, ViTModel) or isinstance(
        model.encoder.layernorm, torch.nn.Identity
    )


def test_what_does_not_fit_is_refused():
    with pytest.raises(
        ValueError, match=r"`hidden_size` is 32.*3 x 4\^2 = 48 values.*readout='linear'"
    ):
        tiny(encoder(hidden_size=32))
    with pytest.raises(ValueError, match="YolosConfig.*last tokens.*ViT"):
        tiny(encoder(YolosConfig, image_size=[16, 16]))
    with pytest.raises(
        ValueError, match=r"\[2, 3, 16, 16\].*\[1, 3, 16, 16\]"
    ):  # one row for all images
        tiny(encoder(PixtralVisionConfig))(
            torch.rand(2, 3, 16, 16), labels=torch.rand(2, 3, 16, 16)
        )
    with pytest.raises(ValueError, match=r"\[2, 3, 16, 18\].*\[2, 3, 16, 16\]"):
        tiny(encoder(Dinov2Config))(torch.rand(2, 3, 16, 18), labels=torch.rand(2, 3, 16, 18))
