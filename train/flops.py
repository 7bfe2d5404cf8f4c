"""What a training step computes in matrix products, and what a device could compute: together, how well it is used.

Model FLOPs utilisation (Chowdhery et al. 2022, PaLM, appendix B) is `matmul_flops` a step, divided by the seconds of
the step and by `peak_flops` of all devices together.
"""

import re
import time
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from transformer_config import TransformerConfig
from transformer_config.config import DType

_TERA = 1e12
_MEASURED_SIZE = 1024

_PEAKS: tuple[tuple[str, Mapping[str, float]], ...] = (
    # "NVIDIA H200 Tensor Core GPU", data sheet, 2024: bfloat16 1,979 (NVL: 1,671) and TF32 989 (835), with sparsity.
    (r"NVIDIA H200 NVL", {"bfloat16": 835.5, "float16": 835.5, "float32": 417.5}),
    (r"NVIDIA H200", {"bfloat16": 989.4, "float16": 989.4, "float32": 494.7}),
    # "NVIDIA H100 Tensor Core GPU Architecture", white paper, table 2 (SXM5, PCIe); data sheet of the NVL, 2024:
    # 1,671 and 835 with sparsity.
    (r"NVIDIA H100 NVL", {"bfloat16": 835.5, "float16": 835.5, "float32": 417.5}),
    (r"NVIDIA H100 PCIe", {"bfloat16": 756.0, "float16": 756.0, "float32": 378.0}),
    (r"NVIDIA H100 80GB HBM3", {"bfloat16": 989.4, "float16": 989.4, "float32": 494.7}),
    # "NVIDIA A100 Tensor Core GPU", data sheet, 2021: the same for every form and size of memory.
    (r"NVIDIA A100\b.*", {"bfloat16": 312.0, "float16": 312.0, "float32": 156.0}),
    # "NVIDIA L4 Tensor Core GPU", data sheet, 2023: bfloat16 242 and TF32 120, with sparsity.
    (r"NVIDIA L4", {"bfloat16": 121.0, "float16": 121.0, "float32": 60.0}),
    # "NVIDIA V100 Tensor Core GPU", data sheet, 2020. Neither bfloat16 nor TF32 is known to its tensor cores.
    (r"Tesla V100S-PCIE\b.*", {"float16": 130.0, "float32": 16.4}),
    (r"Tesla V100-PCIE\b.*", {"float16": 112.0, "float32": 14.0}),
    (r"Tesla V100-SXM2\b.*", {"float16": 125.0, "float32": 15.7}),
    # "NVIDIA T4", data sheet, 2019. Like the V100.
    (r"(Tesla|NVIDIA) T4", {"float16": 65.0, "float32": 8.1}),
    # cloud.google.com/tpu/docs/v4, /v5e, /v5p, /v6e: "peak compute per chip (bf16)". Names as in jax's own tpu_info.py.
    (r"TPU v4", {"bfloat16": 275.0, "float32": 275.0}),
    (r"TPU v5 ?lite|TPU v5e", {"bfloat16": 197.0, "float32": 197.0}),
    (r"TPU v5p?", {"bfloat16": 459.0, "float32": 459.0}),
    (r"TPU v6 ?lite|TPU v6e", {"bfloat16": 918.0, "float32": 918.0}),
)
"""Of a device's name, the operations a second by dtype, in 10¹², dense (data sheets of GPUs since Ampere print twice
that, for matrices half of which is zeros)."""


def forward_matmul_flops(config: TransformerConfig, *, src_len: int, tgt_len: int, rows: int) -> int:
    """Floating-point operations of the matrix products of one forward pass over `rows` pairs of this padded shape.

    A product of (m, k) and (k, n) counts 2mkn: a multiplication and an addition each. With S = src_len, T = tgt_len,
    d = d_model, f = d_ff and V = tgt_vocab_size, a row needs

        encoder layer:  8Sd² (Q, K, V, output) + 4S²d (scores, values) + 4Sdf (feed-forward)
        decoder layer:  8Td² + 4T²d, the same of its own; 4Td² + 4Sd² + 4STd to the memory; 4Tdf
        logits:         2TdV

    Embeddings are looked up: 0. Scores count whole, what masks and windows hide as well, which is how the plain
    attention computes them. Norms, softmax, loss and optimizer are no matrix products.
    """
    d, d_ff = config.d_model, config.d_ff
    encoder_layer = 8 * src_len * d**2 + 4 * src_len**2 * d + 4 * src_len * d * d_ff
    own = 8 * tgt_len * d**2 + 4 * tgt_len**2 * d
    cross = 4 * tgt_len * d**2 + 4 * src_len * d**2 + 4 * src_len * tgt_len * d
    decoder_layer = own + cross + 4 * tgt_len * d * d_ff
    logits = 2 * tgt_len * d * config.tgt_vocab_size
    return rows * (config.num_encoder_layers * encoder_layer + config.num_decoder_layers * decoder_layer + logits)


def matmul_flops(config: TransformerConfig, *, src_len: int, tgt_len: int, rows: int) -> int:
    """Floating-point operations of the matrix products of one training step: 3 x `forward_matmul_flops`.

    Backward, every product C = AB has two, of the same size each: dA = dC Bᵀ and dB = Aᵀ dC. None can be left out:
    what comes in first are embeddings, which are trained. What gradient checkpointing or the blockwise attention
    compute twice is not counted: this is what the model needs, not what a way of computing it costs.
    """
    return 3 * forward_matmul_flops(config, src_len=src_len, tgt_len=tgt_len, rows=rows)


def peak_flops(device: jax.Device, *, dtype: DType = "bfloat16") -> float | None:
    """The most floating-point operations a second that `device` can do in products of dense matrices of `dtype`.

    float32 is what jax makes of it unless `jax_default_matmul_precision` asks for more: TF32 on GPUs that have it,
    bfloat16 on TPUs. None for a device or dtype that is not in the table, CPUs among them (see
    `measured_matmul_rate`).
    """
    for name, peaks in _PEAKS:
        if re.fullmatch(name, device.device_kind):
            return peaks[dtype] * _TERA if dtype in peaks else None
    return None


def measured_matmul_rate(seconds: float = 0.3) -> float:
    """Floating-point operations a second of a large float32 product, on jax's default device, measured now.

    Stands in for the peak of a CPU. The best of the repetitions that fit in `seconds`, at least one: whatever else the
    machine does can only make them slower.
    """
    matrix = jnp.ones((_MEASURED_SIZE, _MEASURED_SIZE), jnp.float32)
    jnp.matmul(matrix, matrix).block_until_ready()  # compiles
    best, end = float("inf"), time.perf_counter() + seconds
    while True:
        started = time.perf_counter()
        jnp.matmul(matrix, matrix).block_until_ready()
        now = time.perf_counter()
        best = min(best, now - started)
        if now >= end:
            return 2 * _MEASURED_SIZE**3 / best
