"""Small checkpoints to be damaged, and what the loader that each was made for reads of it."""

import argparse
import dataclasses
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch

from parity.twins import random_weights
from parity.twins_proof import sinusoids
from parity.weights.foreign import DEFAULTS
from parity.weights.formats import FORMATS, Fields, fairseq
from parity.weights.models import CONFIG, read_model, write_model
from parity.weights.store import Checkpoint, write_tensors
from tests.parity import damage
from tests.parity.formats.foreign import random_model
from tests.parity.formats.test_fairseq import arguments, state_of
from transformer_config import TransformerConfig

SMALL = {"d_model": 6, "d_ff": 7, "num_heads": 2, "num_encoder_layers": 1, "num_decoder_layers": 1, "max_len": 9}
THEIRS = {
    **{"d_model": 8, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 9},
    **{"encoder_ffn_dim": 7, "decoder_ffn_dim": 7, "encoder_layers": 1, "decoder_layers": 1},
}
TIED = {"tie_embeddings": "all", "src_vocab_size": 11, "tgt_vocab_size": 11}

Own = tuple[dict[str, Any], Mapping[str, torch.Tensor]]
"""The fields of a config, and tensors."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """One checkpoint."""

    format_name: str
    target_format: str
    target: str
    build: Callable[[Path], None]
    """Writes it into an empty folder."""
    load: Callable[[Path], Own]
    """What its own loader reads."""
    path: str = "."
    """Of what is converted, in the folder."""
    has_hashes: bool = False
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def expected(self, folder: Path) -> tuple[TransformerConfig, dict[str, np.ndarray]]:
        """By the names of the torch reference, mapped by the format's table."""
        format_ = FORMATS[self.format_name]
        values, tensors = self.load(folder)
        config = format_.read(Fields({**values, **self.settings}, file="the source", defaults=self.defaults))
        stored = {name: tensor.numpy() for name, tensor in tensors.items()}
        return config, format_.mapping(config).apply({**format_.computed(config), **stored})


def our_tensors() -> tuple[TransformerConfig, dict[str, np.ndarray]]:
    config = TransformerConfig.tiny(**SMALL, **TIED)
    return config, random_weights(config, seed=3)


def ours(name: str, *, format_name: str = "torch-reference", metadata: bool = True) -> Callable[[Path], None]:
    def build(folder: Path) -> None:
        config, tensors = our_tensors()
        text = {CONFIG: json.dumps(config.to_dict())} if metadata else {}
        inverse = FORMATS[format_name].mapping(config).inverse()
        tensors = {**inverse.apply({**tensors, "tgt_embedding.weight": tensors["src_embedding.weight"]})}
        aliases = FORMATS[format_name].mapping(config).source_aliases
        stored = {key: array for key, array in tensors.items() if key not in aliases}
        write_tensors(folder / name, Checkpoint(tensors=stored, aliases=aliases, metadata=text))

    return build


def plain(folder: Path) -> None:
    """As `torch.nn.Transformer`'s users save it: no config, no hashes."""
    config = TransformerConfig.tiny(**SMALL, tie_embeddings="none", src_vocab_size=11, tgt_vocab_size=13)
    config = config.replace(final_norm="always")
    tensors = FORMATS["torch-transformer"].mapping(config).inverse().apply(random_weights(config, seed=3))
    state = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in tensors.items()}
    safetensors.torch.save_file(state, folder / "m.safetensors")


def theirs(kind: str, way: str, **changes: Any) -> Callable[[Path], None]:
    def build(folder: Path) -> None:
        model = random_model(kind, 4, **THEIRS, **changes).float()
        size = "6KB" if way == "shards" else "1GB"
        model.save_pretrained(folder, max_shard_size=size)
        if way == "bin":
            (folder / "model.safetensors").unlink()
            torch.save(model.state_dict(), folder / "pytorch_model.bin")

    return build


def our_shards(folder: Path) -> None:
    inner = folder.with_name(folder.name + "-theirs")
    theirs("m2m_100", "whole")(inner)
    folder.rmdir()
    read = read_model(inner)
    write_model(read, folder, "m2m_100", source=inner, sinusoids=sinusoids, max_shard_bytes=6_000)


def fairseq_file(folder: Path) -> None:
    model = random_model("fsmt", 4, **THEIRS, activation_function="relu").float()
    torch.save({"args": arguments(model.config), "model": state_of(model, old=False)}, folder / "m.pt")


def load_safetensors(folder: Path) -> Own:
    file = folder / "m.safetensors"
    tensors = safetensors.torch.load_file(file)
    with safetensors.safe_open(file, "pt") as opened:
        text = opened.metadata() or {}
    aliases = {alias: name for alias, name in text.items() if name in tensors}
    tensors |= {alias: tensors[name] for alias, name in aliases.items() if alias not in tensors}
    return json.loads(text[CONFIG]) if CONFIG in text else {}, tensors


def load_plain(folder: Path) -> Own:
    """What names and shapes say, read off by hand."""
    _, tensors = load_safetensors(folder)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    fields = {
        "src_vocab_size": shapes["src_embedding.weight"][0],
        "d_model": shapes["src_embedding.weight"][1],
        "tgt_vocab_size": shapes["tgt_embedding.weight"][0],
        "d_ff": shapes["encoder.layers.0.linear1.weight"][0],
        "num_encoder_layers": 1,
        "num_decoder_layers": 1,
        "use_bias": "encoder.layers.0.linear1.bias" in shapes,
        "final_norm": "always" if "encoder.norm.weight" in shapes else "never",
        "tie_embeddings": "none",
        "output_bias": "trained" if "output_projection.bias" in shapes else "never",
    }
    return fields, tensors


def load_pt(folder: Path) -> Own:
    loaded = torch.load(folder / "m.pt", map_location="cpu", weights_only=True)
    return json.loads(loaded["metadata"][CONFIG]), loaded["state_dict"]


def load_fairseq(folder: Path) -> Own:
    with torch.serialization.safe_globals([argparse.Namespace]):
        loaded = torch.load(folder / "m.pt", map_location="cpu", weights_only=True)
    tensors = {name: tensor for name, tensor in loaded["model"].items() if name not in fairseq.UNUSED}
    sizes = {
        f"{side}_vocab_size": len(tensors[f"{stack}.embed_tokens.weight"])
        for side, stack in (("src", "encoder"), ("tgt", "decoder"))
    }
    return {**vars(loaded["args"]), **sizes}, tensors


def load_folder(folder: Path) -> Own:
    values = json.loads((folder / "config.json").read_text())
    if (folder / "pytorch_model.bin").exists():
        return values, torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
    if (folder / "model.safetensors").exists():
        return values, safetensors.torch.load_file(folder / "model.safetensors")
    places = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    shards = {name: safetensors.torch.load_file(folder / name) for name in set(places.values())}
    return values, {name: shards[place][name] for name, place in places.items()}


def _folder(kind: str, build: Callable[[Path], None], target_format: str, target: str, **more: Any) -> Source:
    return Source(
        format_name=kind,
        target_format=target_format,
        target=target,
        build=build,
        load=load_folder,
        defaults=DEFAULTS[kind],
        **more,
    )


def _file(kind: str, path: str, build: Callable[[Path], None], load: Callable[[Path], Own], **more: Any) -> Source:
    fields = {"target_format": "torch-reference", "target": "t.safetensors", **more}
    return Source(format_name=kind, path=path, build=build, load=load, **fields)


SOURCES = {
    "our safetensors": _file(
        "torch-reference",
        "m.safetensors",
        ours("m.safetensors"),
        load_safetensors,
        target_format="flax",
        has_hashes=True,
    ),
    "our pt": _file("torch-reference", "m.pt", ours("m.pt"), load_pt, has_hashes=True),
    "no config": _file("torch-transformer", "m.safetensors", plain, load_plain, settings={"num_heads": 2}),
    "fairseq": _file("fairseq", "m.pt", fairseq_file, load_fairseq, defaults=fairseq.DEFAULTS),
    "marian": _folder("marian", theirs("marian", "whole"), "torch-reference", "t.safetensors"),
    "marian in shards": _folder("marian", theirs("marian", "shards"), "marian", "t"),
    "fsmt bin": _folder("fsmt", theirs("fsmt", "bin"), "flax", "t.safetensors"),
    "our shards": _folder("m2m_100", our_shards, "torch-reference", "t.safetensors", has_hashes=True),
}


def damaged(rng: np.random.Generator, name: str, data: bytes) -> tuple[str, bytes]:
    """A file's bytes after one accident of a kind that suits it, and which it was."""
    if rng.integers(2) == 0:
        return damage.of_bytes(rng, data)
    if name.endswith(".json"):
        return damage.of_json(rng, data)
    if name.endswith(".safetensors"):
        return damage.of_header(rng, data)
    with torch.serialization.safe_globals([argparse.Namespace]):
        loaded = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    key = next((key for key in ("state_dict", "model") if key in loaded), None)
    kind = "text"
    if key is None:
        kind, loaded = damage.of_state(rng, loaded)
    elif rng.integers(3):
        kind, loaded[key] = damage.of_state(rng, loaded[key])
    elif "metadata" in loaded:
        damage.of_text(rng, loaded["metadata"])
    else:
        argument = str(rng.choice(list(vars(loaded["args"]))))
        kind = f"argument {argument}"
        setattr(loaded["args"], argument, damage.JUNK[int(rng.integers(len(damage.JUNK)))])
    buffer = io.BytesIO()
    torch.save(loaded, buffer)
    return kind, buffer.getvalue()
