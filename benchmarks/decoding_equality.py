"""Whether decoding finds the same whatever it is done with: the torch reference, batch sizes, devices.

    python benchmarks/decoding_equality.py --run RUN [--data FOLDER] [--split test_2016_flickr] [--json FILE]

A beam of 4, alpha 0.6. In float64: the n-best lists of the Flax decoder, slots taken over and all, and those of the
uncached search of the torch reference, sentence by sentence. In float32, as users have it: translations with batches of
1, 7 and 64, on 1 device and on 8.
"""

import argparse
import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ.setdefault("PJRT_NPROC", "32")

from train.host_memory import keep_freed_memory

keep_freed_memory()

import jax  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402

import torch_reference  # noqa: E402
from flax_transformer.decoding import beam_search  # noqa: E402
from flax_transformer.parameters import abstract_model, with_parameters  # noqa: E402
from parity.weights.twins import twin_mapping  # noqa: E402
from torch_reference.beam import beam_search as reference_beam_search  # noqa: E402
from train.corpus import load_split  # noqa: E402
from train.decode_shapes import source_rows  # noqa: E402
from train.translate import TrainedRun, load_run  # noqa: E402
from train.translator import Translator  # noqa: E402
from transformer_config import BeamConfig  # noqa: E402

SEARCH = BeamConfig(beam_size=4, alpha=0.6, max_len=80, max_len_ratio=2.0)
BATCH_SIZES, DEVICES = (1, 7, 64), (1, 8)


def against_reference(trained: TrainedRun, sentences: list[list[int]]) -> dict[str, Any]:
    """Both twins in float64: how many n-best lists are the same, and how far scores are apart."""
    search = dataclasses.replace(SEARCH, num_hypotheses=SEARCH.beam_size)
    config = trained.config.model.replace(dtype="float64", param_dtype="float64")
    params = {name: np.asarray(array).astype(np.float64) for name, array in trained.params.items()}
    longest = max(map(len, sentences))
    src = source_rows(sentences, rows=len(sentences), src_len=longest, pad_id=config.pad_id)
    with jax.enable_x64(True):
        model = abstract_model(config)
        decode = jax.jit(lambda params, src: beam_search(with_parameters(model, params), src, config=search, slots=64))
        ours = jax.device_get(decode(params, src))
    reference = torch_reference.Transformer(config, generator=torch.Generator().manual_seed(0)).double()
    weights = twin_mapping(tied=config.tie_embeddings == "all").inverse().apply(params)
    reference.load_state_dict({name: torch.tensor(array) for name, array in weights.items()}, strict=False)
    same, apart = 0, 0.0
    for row, sentence in enumerate(sentences):
        theirs = reference_beam_search(reference, torch.tensor([sentence], dtype=torch.int32), config=search)
        ids = theirs.ids[0].numpy()
        width = min(ids.shape[-1], ours.ids.shape[-1])
        same += np.array_equal(ids[:, :width], ours.ids[row][:, :width])
        apart = max(apart, float(np.abs(theirs.scores[0].numpy() / ours.scores[row] - 1.0).max()))
    return {"sentences": len(sentences), "identical n-best lists": int(same), "scores apart, relative": apart}


def against_itself(run: Path, lines: list[str]) -> dict[str, Any]:
    """Translations of the same weights, decoded in other ways."""
    found = {}
    for devices in DEVICES:
        for batch_size in BATCH_SIZES:
            trained = load_run(run, num_devices=devices).with_batch_size(batch_size)
            translator = Translator(trained.config, trained.tokenizer, trained.devices, search=SEARCH)
            started = time.perf_counter()
            found[batch_size, devices] = translator.translate(trained.params, lines).lines
            print(f"batch {batch_size}, {devices} devices: {time.perf_counter() - started:.0f} s", flush=True)
    first = found[BATCH_SIZES[-1], 1]
    return {
        f"batch {batch_size}, {devices} devices": sum(a == b for a, b in zip(translations, first, strict=True))
        for (batch_size, devices), translations in found.items()
    }


def main() -> None:
    """Measures, prints, writes; exit status 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--data", type=Path, help="folder of the corpus, if not where the run had it")
    parser.add_argument("--split", default="test_2016_flickr")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    trained = load_run(arguments.run)
    corpus = trained.config.corpus
    if arguments.data is not None:
        corpus = dataclasses.replace(corpus, path=arguments.data)
    lines = list(load_split(corpus, arguments.split).source)
    sentences = trained.tokenizer.encode_sources([line.strip() for line in lines])
    figures = {
        "identical to batch 64 on 1 device": against_itself(arguments.run, lines),
        "reference, float64": against_reference(trained, sentences),
    }
    print(json.dumps(figures, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    same = {
        *figures["identical to batch 64 on 1 device"].values(),
        figures["reference, float64"]["identical n-best lists"],
    }
    raise SystemExit(0 if same == {len(lines)} else 1)


if __name__ == "__main__":
    main()
