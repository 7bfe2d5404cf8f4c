"""An imported model as the folder of a run, with its tokenizer, for `python -m train` to translate and begin with."""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from parity.weights.foreign import Model
from parity.weights.formats import FORMATS, FieldError
from parity.weights.lazy import Converted
from parity.weights.models import WholeTensors, Written, is_run, write_model
from parity.weights.twins import reference_shapes, twin_mapping
from train.checkpoint import Checkpoints, RunRecord
from train.config import BatchConfig, CorpusConfig, EvaluationConfig, TokenizerConfig, TrainConfig
from train.run_dir import RunDir
from train.search import SearchConfig
from train.transformers_tokenizer import TransformersTokenizer, files_of
from transformer_config import BeamConfig, LengthConfig, TransformerConfig

TARGET = "run"
"""As the command line has it."""
LONGEST = 512
"""Pieces of a translation, where neither the model nor its usual search says less."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Writer:
    """`write_model`, which can also write runs, and gives a folder of `transformers` the tokenizer of the run that it
    is made of."""

    run_dir: Path
    """The folder as it will be called."""
    tokenizer: Path | None = None
    """Folder of the tokenizer, if it is not the model's."""
    languages: tuple[str, str] | None = None

    def __call__(self, model: Model, path: Path, format_name: str, *, source: Path, **options: Any) -> Written:
        """Raises FieldError, StoreError, or ValueError for a tokenizer that is missing or does not fit."""
        if format_name == TARGET:
            if options.get("max_shard_bytes") is not None:
                raise ValueError(f"--max-shard-bytes: expected none with --to {TARGET}, which Orbax writes")
            return self._write_run(model, path, source=source)
        for option, given in (("--tokenizer", self.tokenizer), ("--languages", self.languages)):
            if given is not None:
                raise ValueError(f"{option}: expected only with --to {TARGET}, got it with --to {format_name}")
        written = write_model(model, path, format_name, source=source, **options)
        if path.is_dir() and (path / "generation_config.json").is_file() and is_run(source):
            for name, data in files_of(RunDir(source).tokenizer_file).items():
                (path / name).write_bytes(data)
        return written

    def _write_run(self, model: Model, path: Path, *, source: Path) -> Written:
        config = model.config.replace(dtype="float32", param_dtype="float32")
        tokenizer = self._tokenizer(config, source)
        run = _run_config(config, model.search, tokenizer, self.run_dir)
        whole = WholeTensors(source, model.weights, reference_shapes(config))
        carried = Converted(twin_mapping(tied=config.tie_embeddings == "all"), whole)
        params = {name: _float32(carried[name], f"{source}: {name}") for name in carried}
        record = RunRecord(
            config=run.to_dict(),
            tokenizer=tokenizer.to_json(),
            inference_only=f"imported from {source.name} ({model.format_.name}); to train it further, begin another "
            f"run with --init-from {self.run_dir}",
        )
        target = RunDir(path)
        target.write_config(run)
        tokenizer.save(target.tokenizer_file)
        with contextlib.closing(Checkpoints(target.checkpoints, keep=1)) as checkpoints:
            checkpoints.save_params(0, params, record)
        return Written(
            format_=FORMATS["flax"],
            config=config,
            tensors=len(params),
            nbytes=sum(array.nbytes for array in params.values()),
            changed={},
        )

    def _tokenizer(self, config: TransformerConfig, source: Path) -> TransformersTokenizer:
        if is_run(source):
            raise FieldError(f"{source}: expected a model to import, got a run, which needs no importing")
        folder = self.tokenizer or source
        if not folder.is_dir():
            given = "none" if self.tokenizer is None else f"{folder}, which is no folder"
            raise ValueError(f"{source}: expected --tokenizer FOLDER with the files of its tokenizer, got {given}")
        special = {name: getattr(config, name) for name in ("pad_id", "bos_id", "eos_id")}
        try:
            tokenizer = TransformersTokenizer.of_folder(folder, languages=self.languages, **special)
        except ValueError as error:
            raise ValueError(str(error) if str(folder) in str(error) else f"{folder}: {error}") from error
        largest = max(config.src_vocab_size, config.tgt_vocab_size)
        if tokenizer.size > largest:
            raise ValueError(
                f"{folder}: expected a tokenizer with ids below {largest}, the model's, got {tokenizer.size}"
            )
        return tokenizer


def _float32(array: np.ndarray, name: str) -> np.ndarray:
    if array.dtype.itemsize > np.dtype(np.float32).itemsize:
        raise FieldError(f"{name}: expected at most float32, which runs are trained in, got {array.dtype}")
    return array.astype(np.float32)


def _run_config(
    config: TransformerConfig, search: LengthConfig | None, tokenizer: TransformersTokenizer, run_dir: Path
) -> TrainConfig:
    limit = config.sequence_limit or LONGEST
    usual = search or LengthConfig(max_len=LONGEST)
    forced: dict[str, Any] = {
        "never": usual.never,
        # What was asked for with the languages counts more than what generation_config.json forces.
        "first_id": usual.first_id if tokenizer.first_id is None else tokenizer.first_id,
        "forced_end": usual.forced_end,
        "min_len": usual.min_len,
        "max_len_growth": 0.0 if search is not None else 2.0,
        "max_len_ratio": None if search is not None else 2.0,
    }
    if isinstance(usual, BeamConfig):
        names = ("beam_size", "alpha", "length_penalty", "stopping", "renormalize")
        looked_for = SearchConfig(**forced, **{name: getattr(usual, name) for name in names})
    else:
        looked_for = SearchConfig(**forced, beam_size=1 if search is not None else 4)
    languages = tokenizer.languages or ("source", "target")
    batch = BatchConfig()
    return TrainConfig(
        run_dir=run_dir,
        corpus=CorpusConfig(
            kind="files", path=run_dir / "corpus", source_language=languages[0], target_language=languages[1]
        ),
        tokenizer=TokenizerConfig(kind="transformers"),
        model=config,
        batch=dataclasses.replace(batch, max_len=min(batch.max_len, limit)),
        evaluation=EvaluationConfig(max_decode_len=min(usual.max_len, limit)),
        search=looked_for,
    )
