"""Hold the networks: plain ``nn.Module`` classes whose first two parameters are ``num_classes`` and ``in_channels``."""

from fulgurite.models.resnet import ResNet
from fulgurite.models.small_cnn import SmallCNN

__all__ = ["ResNet", "SmallCNN"]
