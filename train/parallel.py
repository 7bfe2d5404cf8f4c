"""The only file of `train` that places work on devices: processes, meshes, jit, pmap.

With jit there is one mesh with two axes, ("data", "fsdp"). The rows of a batch are spread over both; parameters and
optimizer state are whole on every device along "data" and cut along "fsdp". With pmap every device has a whole state,
and gradients are added up between them. Either way it is the same step, on the same batches, with the same dropout.
"""

import copy
import dataclasses
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from flax_transformer import Packing
from flax_transformer.decoding import Hypotheses, beam_search, greedy, sample
from flax_transformer.parameters import abstract_model, with_parameters
from flax_transformer.transformer import check_ids
from train import cloud_tpu
from train.batching import Batch, Bucket
from train.compilation import Compiled
from train.config import ParallelConfig, TrainConfig
from train.state import TrainState
from train.step import Across, Arrays, make_evaluation_step, make_train_step
from transformer_config import BeamConfig, LengthConfig, SamplingConfig, TransformerConfig

ROWS = ("data", "fsdp")
"""Mesh axes over which the rows of a batch are spread: all there are."""
CLUSTERS = {
    "SLURM_NTASKS": "Slurm",
    "JOB_COMPLETION_INDEX": "Kubernetes",
    "TPU_WORKER_HOSTNAMES": "Cloud TPU",
    "MEGASCALE_COORDINATOR_ADDRESS": "Cloud TPU, several slices",
}
"""Variables that say that a process is one of several, where jax finds out the rest by itself."""


def start_processes(config: ParallelConfig, environment: Mapping[str, str] = os.environ) -> str | None:
    """Joins the processes of a run, if there are several; returns what said so. Before anything else of jax is used.

    Raises ValueError or RuntimeError, by jax, if they cannot find each other.
    """
    if config.coordinator_address is not None:
        jax.distributed.initialize(config.coordinator_address, config.num_processes, config.process_id)
        return f"process {config.process_id} of {config.num_processes}"
    cluster = several_processes(environment)
    if cluster is not None:
        jax.distributed.initialize()
    return cluster


def several_processes(environment: Mapping[str, str]) -> str | None:
    """The kind of cluster that has started this process as one of several, or None."""
    for variable, cluster in CLUSTERS.items():
        value = environment.get(variable, "")
        one_alone = value in ("", "1", "localhost") if variable != "JOB_COMPLETION_INDEX" else not value
        if variable == "TPU_WORKER_HOSTNAMES" and "," not in value:
            one_alone = True
        if not one_alone:
            return cluster
    return "Cloud TPU" if cloud_tpu.is_one_of_several(environment) else None


def is_main_process() -> bool:
    """Whether this process is the one that prints and writes."""
    return jax.process_index() == 0


def wait_for_all(name: str) -> None:
    """Returns when every process has come here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def any_process(flag: bool) -> bool:
    """Whether the flag is up in any process; every process has to ask."""
    if jax.process_count() == 1:
        return flag
    return bool(multihost_utils.process_allgather(np.array(flag)).any())


@dataclasses.dataclass(frozen=True)
class Share:
    """Which rows of each micro-batch belong on one device: start to stop, counted within the micro-batch."""

    device: jax.Device
    start: int
    stop: int


class Devices:
    """The devices of a run: places batches and states on them, and compiles for them.

    Raises ValueError for a number of devices that there are not, or that `fsdp` does not divide.
    """

    def __init__(self, config: ParallelConfig):
        every = jax.devices()
        number = len(every) if config.num_devices is None else config.num_devices
        if number > len(every):
            raise ValueError(f"parallel.num_devices: expected at most the {len(every)} there are, got {number}")
        if number < len(every) and jax.process_count() > 1:
            raise ValueError("parallel.num_devices: expected None where there are several processes")
        if number % config.fsdp:
            raise ValueError(f"parallel.fsdp: expected a divisor of the {number} devices, got {config.fsdp}")
        self.devices = every[:number]
        self.mesh = Mesh(np.array(self.devices).reshape(-1, config.fsdp), ROWS)
        self.pmapped = config.mode == "pmap"
        self.micro_batches = config.accumulation_steps
        self._whole = NamedSharding(self.mesh, PartitionSpec())
        self._rows = NamedSharding(self.mesh, PartitionSpec(None, ROWS))
        self._copies = NamedSharding(self.mesh, PartitionSpec(ROWS))

    def for_evaluation(self) -> "Devices":
        """The same devices, under jit, with batches in one piece."""
        devices = copy.copy(self)
        devices.pmapped, devices.micro_batches = False, 1
        return devices

    def __str__(self) -> str:
        name = self.devices[0].device_kind
        mode = "pmap" if self.pmapped else "jit, mesh " + " x ".join(f"{k} {v}" for k, v in self.mesh.shape.items())
        return f"{len(self.devices)} x {name} in {jax.process_count()} process(es), {mode}"

    @property
    def _tokens_at_once(self) -> int:
        """Over all devices. On a CPU few, whose logits stay in its cache; an accelerator wants large products."""
        return len(self.devices) * (512 if self.devices[0].platform == "cpu" else 4096)

    # States.

    def place_state(self, state: TrainState) -> TrainState:
        """A whole state, which every process has, on the devices."""
        if self.pmapped:
            copies = len(self.devices)
            return jax.tree.map(lambda x: _placed(np.broadcast_to(x, (copies, *np.shape(x))), self._copies), state)
        # Copies, because the state is given up to the first step, and jax may share the memory of a numpy array.
        return jax.tree.map(lambda x: _placed(np.array(x), self._sharding(x)), state)

    def _sharding(self, leaf: Any) -> NamedSharding:
        """Matrices are cut along the longest axis that "fsdp" divides; all else is whole everywhere."""
        parts = self.mesh.shape["fsdp"]
        divisible = [axis for axis, size in enumerate(np.shape(leaf)) if size % parts == 0]
        if parts == 1 or np.ndim(leaf) < 2 or not divisible:
            return self._whole
        cut = max(divisible, key=lambda axis: np.shape(leaf)[axis])
        return NamedSharding(self.mesh, PartitionSpec(*["fsdp" if axis == cut else None for axis in range(cut + 1)]))

    def to_save(self, state: TrainState) -> TrainState:
        """The state as a checkpoint holds it, the same for every number of devices."""
        return jax.tree.map(_first_copy, state) if self.pmapped else state

    def inference_params(self, state: TrainState) -> dict[str, Array]:
        """What is evaluated, as `compile_evaluation_step` and `compile_decoding` take it."""
        params = state.inference_params
        return self.place_params(jax.tree.map(_first_copy, params)) if self.pmapped else params

    def place_params(self, params: dict[str, Any]) -> dict[str, Array]:
        """Parameters for inference, whole on every device."""
        return {name: _placed(np.asarray(value), self._whole) for name, value in params.items()}

    # Batches.

    def padded_rows(self, rows: int) -> int:
        """Rows of a batch when it has been filled up for all devices and micro-batches."""
        multiple = len(self.devices) * self.micro_batches
        return -(-rows // multiple) * multiple

    def batch_shapes(self, bucket: Bucket, *, packed: bool) -> Arrays:
        """What `place_batch` makes of a batch of this shape, without the numbers."""
        per_micro = self.padded_rows(bucket.batch_size) // self.micro_batches
        lead: tuple[int, ...] = (self.micro_batches, per_micro)
        if self.pmapped:
            lead = (len(self.devices), self.micro_batches, per_micro // len(self.devices))

        def shape(*tail: int) -> Any:
            return jax.ShapeDtypeStruct(
                (*lead, *tail), jnp.int32, sharding=self._copies if self.pmapped else self._rows
            )

        src, tgt = shape(bucket.src_len), shape(bucket.tgt_len)
        return Arrays(src, tgt, tgt, shape(), Packing(src, tgt) if packed else None)

    def place_batch(self, bucket: Bucket, rows: Callable[[int, int], Batch], *, vocab_sizes: tuple[int, int]) -> Arrays:
        """A batch, of which this process makes its own rows only, by `rows(start, stop)`.

        Raises ValueError for ids outside the vocabularies, of source and target: here, because a compiled gather clamps
        them.
        """
        per_micro = self.padded_rows(bucket.batch_size) // self.micro_batches
        made = {
            (share.start, share.stop): self._micro_batches(share, per_micro, rows, vocab_sizes)
            for share in self._shares(per_micro)
        }
        of_devices = [(share.device, made[share.start, share.stop]) for share in self._shares(per_micro)]

        def joined(*leaves: np.ndarray) -> Array:
            shape, sharding = (self.micro_batches, per_micro, *leaves[0].shape[2:]), self._rows
            if self.pmapped:
                shape, sharding = (len(self.devices), *leaves[0].shape), self._copies
                leaves = tuple(leaf[None] for leaf in leaves)
            pieces = [jax.device_put(leaf, device) for leaf, (device, _) in zip(leaves, of_devices, strict=True)]
            return jax.make_array_from_single_device_arrays(shape, sharding, pieces)

        return jax.tree.map(joined, *(arrays for _, arrays in of_devices))

    def _shares(self, per_micro: int) -> list[Share]:
        """Those of this process's devices, in their order."""
        indices = self._rows.addressable_devices_indices_map((self.micro_batches, per_micro))
        shares = [Share(device, *index[1].indices(per_micro)[:2]) for device, index in indices.items() if index]
        return sorted(shares, key=lambda share: self.devices.index(share.device))

    def _micro_batches(
        self, share: Share, per_micro: int, rows: Callable[[int, int], Batch], vocab_sizes: tuple[int, int]
    ) -> Arrays:
        cut = [(m * per_micro + share.start, m * per_micro + share.stop) for m in range(self.micro_batches)]
        batches = [rows(start, stop) for start, stop in cut]
        pieces = [_arrays(batch, *numbers) for batch, numbers in zip(batches, cut, strict=True)]
        arrays = jax.tree.map(lambda *leaves: np.stack(leaves), *pieces)
        src_vocab_size, tgt_vocab_size = vocab_sizes
        for name, size in (("src", src_vocab_size), ("tgt_in", tgt_vocab_size), ("tgt_out", tgt_vocab_size)):
            check_ids(getattr(arrays, name), name=name, vocab_size=size)
        return arrays

    # Programs.

    def compile_train_step(self, config: TrainConfig) -> Compiled[..., Any]:
        """The training step; the state that goes in is given up, so that its memory serves the one that comes out."""
        if self.pmapped:
            across = Across(
                sum=partial(jax.lax.psum, axis_name="devices"), tokens_at_once=self._tokens_at_once // len(self.devices)
            )
            step = jax.pmap(
                make_train_step(config, across=across),
                axis_name="devices",
                donate_argnums=0,
                devices=None if jax.process_count() > 1 else self.devices,
            )
            return Compiled(step)
        across = Across(tokens_at_once=self._tokens_at_once)
        if self.mesh.shape["fsdp"] > 1:
            gathered = partial(jax.lax.with_sharding_constraint, shardings=self._whole)
            across = dataclasses.replace(across, gathered=gathered)
        step = make_train_step(config, across=across)
        return Compiled(jax.jit(self._keeping_place(step), donate_argnums=0))

    def _keeping_place(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """The step, with the state that comes out lying where the one that went in did."""

        def placed(state: TrainState, batch: Arrays) -> Any:
            state, metrics = step(state, batch)
            where = jax.tree.map(self._sharding, state), jax.tree.map(lambda _: self._whole, metrics)
            return jax.lax.with_sharding_constraint((state, metrics), where)

        return placed

    def compile_evaluation_step(self, config: TransformerConfig) -> Compiled[..., Any]:
        """The evaluation step; its sums are whole in every process."""
        step = make_evaluation_step(config, tokens_at_once=self._tokens_at_once)
        return Compiled(jax.jit(step, out_shardings=self._whole))

    def compile_decoding(
        self, config: TransformerConfig, search: LengthConfig, *, slots: int, room: int, seed: int = 0
    ) -> Compiled[..., Any]:
        """Decoding: (params, src, numbers of the sentences) -> `Hypotheses`, with so many slots over all devices.

        Every device decodes the sentences it has, without waiting for the others. Whoever calls it has checked the ids.
        """
        model = abstract_model(config)
        of_device = max(1, slots // len(self.devices))

        def decode(
            params: dict[str, Array], src: Int[Array, "batch src_len"], numbers: Int[Array, " batch"]
        ) -> Hypotheses:
            module = with_parameters(model, params)
            if isinstance(search, BeamConfig):
                return beam_search(module, src, config=search, slots=of_device, room=room)
            if isinstance(search, SamplingConfig):
                return sample(module, src, config=search, seed=seed, numbers=numbers, slots=of_device, room=room)
            return greedy(module, src, config=search, slots=of_device, room=room)

        rows = PartitionSpec(ROWS)
        shared = jax.shard_map(
            decode, mesh=self.mesh, in_specs=(PartitionSpec(), rows, rows), out_specs=rows, check_vma=False
        )
        return Compiled(jax.jit(shared, out_shardings=self._whole))

    def place_sources(self, src: Int[np.ndarray, "batch ..."]) -> Int[Array, "batch ..."]:
        """Rows to decode, or their numbers, spread over the devices: as many as `padded_rows` says."""
        return _placed(src, NamedSharding(self.mesh, PartitionSpec(ROWS)))

    def metrics(self, tree: Any) -> Any:
        """What a step reported, in numpy; waits until it has been computed."""
        return jax.tree.map(_first_copy if self.pmapped else np.asarray, tree)


def _arrays(batch: Batch, start: int, stop: int) -> Any:
    """`Arrays` of numpy arrays."""
    segments: list[Any] = [batch.src_segments, batch.tgt_segments]
    packing = None if batch.src_segments is None else Packing(*segments)
    fields: list[Any] = [batch.src, batch.tgt_in, batch.tgt_out, np.arange(start, stop, dtype=np.int32), packing]
    return Arrays(*fields)


def _placed(value: np.ndarray, sharding: NamedSharding) -> Array:
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def _first_copy(leaf: Any) -> np.ndarray:
    """Of what pmap has on every device, without the axis of devices."""
    shard = leaf.addressable_shards[0].data if isinstance(leaf, jax.Array) else leaf
    return np.asarray(np.asarray(shard)[0])
