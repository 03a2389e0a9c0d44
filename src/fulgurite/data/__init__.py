"""Data sources a configuration can name, and what they share."""

from fulgurite.data.base import ImageDataModule
from fulgurite.data.digits import DigitsDataModule
from fulgurite.data.image_folder import ImageFolderDataModule
from fulgurite.data.manifest import ManifestDataModule
from fulgurite.data.spec import DataSpec
from fulgurite.data.splits import Holdout
from fulgurite.data.streaming import StreamingDataModule
from fulgurite.data.torchvision_data import TorchvisionDataModule

__all__ = [
    "DataSpec",
    "DigitsDataModule",
    "Holdout",
    "ImageDataModule",
    "ImageFolderDataModule",
    "ManifestDataModule",
    "StreamingDataModule",
    "TorchvisionDataModule",
]
