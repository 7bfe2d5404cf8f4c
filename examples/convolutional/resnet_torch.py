"""A small residual network: convolutions, BatchNorm, and a classifier on the mean of the feature map."""

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


class Block(nn.Module):
    """Two convolutions, the first with a stride, beside a 1x1 convolution."""

    def __init__(self, channels: int, out_channels: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.shortcut = nn.Conv2d(channels, out_channels, 1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Images (batch, channels, height, width) to class scores."""

    def __init__(self, classes: int = 10):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.blocks = nn.ModuleList([Block(6, 8, stride=2), Block(8, 12, stride=1)])
        self.dropout = nn.Dropout(0.2)
        self.classifier = nn.Linear(12, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.stem(images))
        for block in self.blocks:
            x = block(x)
        return self.classifier(self.dropout(x.mean(dim=(2, 3))))
