"""Labels of folders of images."""

import pytest
from PIL import Image

from hf_descent.data.images import load_image_classification
from hf_descent.data.splits import SplitArguments


@pytest.mark.parametrize("has_metadata", [False, True])
def test_labels_whose_types_are_guessed_are_said(tmp_path, caplog, has_metadata):
    lines = ["file_name,label"]
    for number, label in enumerate(["01", "10"] * 10):
        folder = tmp_path / "images"
        if not has_metadata:
            folder /= label
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (2, 2), (number, 0, 0)).save(folder / f"{number}.png")
        lines.append(f"{number}.png,{label}")
    if has_metadata:
        (folder / "metadata.csv").write_text("\n".join(lines))

    args = SplitArguments(dataset_name=str(tmp_path / "images"))
    train = load_image_classification(args, "image", "label")["train"]
    if has_metadata:
        assert train.features["labels"].names == ["1", "10"]
        assert "The metadata files of" in caplog.text and "into a folder of its name" in caplog.text
    else:
        assert train.features["labels"].names == ["01", "10"]
        assert "guesses" not in caplog.text
