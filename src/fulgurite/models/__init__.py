"""Hold the networks: plain ``nn.Module`` classes whose first two parameters are ``num_classes`` and ``in_channels``."""

from fulgurite.models.huggingface_network import HuggingFaceNetwork
from fulgurite.models.resnet import ResNet
from fulgurite.models.resnet9 import ResNet9
from fulgurite.models.small_cnn import SmallCNN
from fulgurite.models.timm_network import TimmNetwork
from fulgurite.models.torchvision_network import TorchvisionNetwork
from fulgurite.models.vit import ViT

__all__ = ["HuggingFaceNetwork", "ResNet", "ResNet9", "SmallCNN", "TimmNetwork", "TorchvisionNetwork", "ViT"]
