"""Labels of folders of images."""

from PIL import Image

from hf_descent.data.images import load_image_classification
from hf_descent.data.splits import SplitArguments


def test_images_have_the_class_of_their_folder(tmp_path):
    for number, label in enumerate(["01", "10"] * 10):
        folder = tmp_path / "images" / label
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (2, 2), (number, 0, 0)).save(folder / f"{number}.png")

    args = SplitArguments(dataset_name=str(tmp_path / "images"))
    train = load_image_classification(args, "image", "label")["train"]
    assert train.features["labels"].names == ["01", "10"]
