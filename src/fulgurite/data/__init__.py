"""Data sources a configuration can name, and what they share."""

from fulgurite.data.base import ImageDataModule
from fulgurite.data.digits import DigitsDataModule
from fulgurite.data.spec import DataSpec

__all__ = ["DataSpec", "DigitsDataModule", "ImageDataModule"]
