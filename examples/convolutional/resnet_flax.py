"""The port: the same names, channels last."""

import jax
from flax import nnx
from jax import Array

UNIFORM = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
"""Within 1/√fan_in, as torch draws its weights."""

MOMENTUM = 0.9
"""Share of the old running statistics: torch's default momentum of 0.1 is the share of the new ones."""


def uniform_bias(fan_in: int) -> nnx.Initializer:
    """Within 1/√fan_in, as torch draws its biases."""
    return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -(fan_in**-0.5), fan_in**-0.5)


class Block(nnx.Module):
    """Two convolutions, the first with a stride, beside a 1x1 convolution."""

    def __init__(self, channels: int, out_channels: int, stride: int, *, rngs: nnx.Rngs):
        # Padding in numbers: with a stride, "SAME" pads another side than torch does.
        self.conv1 = nnx.Conv(
            channels,
            out_channels,
            (3, 3),
            strides=stride,
            padding=((1, 1), (1, 1)),
            use_bias=False,
            kernel_init=UNIFORM,
            rngs=rngs,
        )
        self.bn1 = nnx.BatchNorm(out_channels, momentum=MOMENTUM, epsilon=1e-5, rngs=rngs)
        self.conv2 = nnx.Conv(
            out_channels,
            out_channels,
            (3, 3),
            padding=((1, 1), (1, 1)),
            use_bias=False,
            kernel_init=UNIFORM,
            rngs=rngs,
        )
        self.bn2 = nnx.BatchNorm(out_channels, momentum=MOMENTUM, epsilon=1e-5, rngs=rngs)
        self.shortcut = nnx.Conv(
            channels,
            out_channels,
            (1, 1),
            strides=stride,
            padding="VALID",
            kernel_init=UNIFORM,
            bias_init=uniform_bias(channels),
            rngs=rngs,
        )

    def __call__(self, x: Array) -> Array:
        y = jax.nn.relu(self.bn1(self.conv1(x)))
        return jax.nn.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet(nnx.Module):
    """Images (batch, height, width, channels) to class scores."""

    def __init__(self, classes: int = 10, *, rngs: nnx.Rngs):
        self.stem = nnx.Conv(
            3, 6, (3, 3), padding=((1, 1), (1, 1)), kernel_init=UNIFORM, bias_init=uniform_bias(27), rngs=rngs
        )
        self.blocks = nnx.List([Block(6, 8, 2, rngs=rngs), Block(8, 12, 1, rngs=rngs)])
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.classifier = nnx.Linear(12, classes, kernel_init=UNIFORM, bias_init=uniform_bias(12), rngs=rngs)

    def __call__(self, images: Array) -> Array:
        x = jax.nn.relu(self.stem(images))
        for block in self.blocks:
            x = block(x)
        return self.classifier(self.dropout(x.mean(axis=(1, 2))))
