"""Image classification data, read by timm."""

from pathlib import Path
from typing import Any

from timm.data import ImageDataset, create_transform
from timm.data.readers import create_reader
from torch.utils.data import Dataset

from tlalign_mm.registry import DATASETS


@DATASETS.register_module()
class ImageFolder(Dataset):
    """A folder with a folder a class, as ImageNet is unpacked.

    Args:
        data_root: Folder that holds the splits.
        split: Folder of the split inside it.
        transform: Arguments of ``timm.data.create_transform`` (``input_size``, ``is_training``, …);
            normalisation is left to the data preprocessor.

    Raises:
        FileNotFoundError: If the folder does not exist or holds no class folder with an image.
    """

    def __init__(self, data_root: str, split: str, transform: dict[str, Any]) -> None:
        folder = Path(data_root) / split
        if not folder.is_dir():
            raise FileNotFoundError(
                f"Data folder {folder} does not exist; prepare the data or correct data_root."
            )
        try:
            reader = create_reader("folder", root=str(folder))
        except RuntimeError as error:  # timm found no image
            raise FileNotFoundError(
                f"Data folder {folder} holds no image; it needs a folder a class with images in it."
            ) from error
        self.images = ImageDataset(
            str(folder), reader=reader, transform=create_transform(**transform, normalize=False)
        )
        self.classes = list(reader.class_to_idx)  # in timm's order: 2 comes before 10

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image, label = self.images[index]
        return {"inputs": image, "labels": label}
