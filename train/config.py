"""Everything that defines a training run, as frozen nested dataclasses. Imports no jax, so `--help` answers at once."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from train.search import SearchConfig
from transformer_config import BOS_ID, EOS_ID, PAD_ID, TransformerConfig

T = TypeVar("T")


def _expect_positive(section: str, config: Any, *names: str) -> None:
    for name in names:
        if not getattr(config, name) > 0:
            raise ValueError(f"{section}.{name}: expected more than 0, got {getattr(config, name)!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    """Which parallel text to train on."""

    kind: Literal["demo", "files", "iwslt", "hub"] = "demo"
    """`demo` is built from Unicode CLDR at run time; `files` reads `path`; `iwslt` reads IWSLT's own files there; `hub`
    loads `hub` with the library `datasets`."""
    path: Path | None = None
    """Of files and iwslt: folder that holds, for every split, `<split>.<language>` in both languages, `<split>.tsv`,
    `<split>.jsonl` or `<split>.parquet` (all but the last plain or .gz); or `train.tags.de-en.de`,
    `IWSLT16.TED.tst2013.de-en.de.xml`."""
    hub: str | None = None
    """Of hub: name of a dataset, such as `bentrevett/multi30k` or `wmt/wmt14`, or a folder with a dataset's files."""
    hub_config: str | None = None
    """Which of the dataset's configs, such as `de-en`; None: the only one."""
    hub_revision: str | None = None
    """Branch, tag or commit of the dataset; None: main. Of a dataset that is a script, the hub keeps Parquet files in
    `refs/convert/parquet`; hub_config is then a folder there, such as `iwslt2017-de-en`."""
    source_language: str = "de"
    target_language: str = "en"
    train_split: str = "train"
    validation_split: str = "val"
    test_split: str = "test_2016_flickr"
    cache: Path = Path("runs/cache")
    """Folder for the training text as piece ids, made once for a text and a tokenizer."""
    num_pairs: int = 20_000
    """Distinct pairs of the demo corpus, held-out ones included."""
    seed: int = 0
    """Of the demo corpus: which combinations are drawn and which are held out."""

    def __post_init__(self) -> None:
        if self.kind in ("files", "iwslt") and self.path is None:
            raise ValueError(f"corpus.path: expected a folder of files with corpus.kind={self.kind!r}, got None")
        # A path that is not needed is no mistake: presets have one, and only the kind is changed on the command line.
        if self.kind == "hub" and not self.hub:
            raise ValueError(f"corpus.hub: expected the name of a dataset with corpus.kind='hub', got {self.hub!r}")
        for name in ("hub", "hub_config", "hub_revision"):
            if self.kind != "hub" and getattr(self, name) is not None:
                raise ValueError(
                    f"corpus.{name}: expected None with corpus.kind={self.kind!r}, got {getattr(self, name)!r}"
                )
        if self.hub_is_converted and not self.hub_config:
            raise ValueError(
                f"corpus.hub_config: expected a folder of the branch with corpus.hub_revision={self.hub_revision!r}, "
                f"got {self.hub_config!r}"
            )
        _expect_positive("corpus", self, "num_pairs")

    @property
    def is_missing(self) -> bool:
        """Whether it is a folder of files that is not there, as with imported models."""
        return self.kind in ("files", "iwslt") and self.path is not None and not self.path.is_dir()

    @property
    def hub_is_converted(self) -> bool:
        """Whether it is the branch with Parquet files that the hub makes by itself, a folder for each config."""
        return self.hub_revision == "refs/convert/parquet"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """By default joint byte-level BPE over both languages, learned from the corpus."""

    kind: Literal["bpe", "transformers"] = "bpe"
    """`transformers`: the one that an imported model came with."""
    vocab_size: int = 8_000
    """Pieces, special ones and the 256 bytes included; fewer if the text has no more merges to learn."""
    split_digits: bool = False
    """One piece a digit, so that numbers never seen in training can be spelled."""

    def __post_init__(self) -> None:
        if self.vocab_size < 260:
            raise ValueError(
                f"tokenizer.vocab_size: expected at least 260 (256 bytes and 4 special pieces), got {self.vocab_size}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Batches of fixed shapes under a token budget."""

    max_tokens: int = 2_500
    """Padded positions a side in one batch, at most."""
    num_buckets: int = 6
    """Shapes, and so compilations of the training step, at most."""
    max_len: int = 128
    """Pairs with more pieces than this on either side, end of sentence included, are left out, counted and reported."""
    packing: bool = False
    """Several pairs in one row, none of them seeing another: all batches of training have one shape, with rows of
    `max_len` pieces on the longer side and little padding. `num_buckets` is then for evaluation alone."""

    def __post_init__(self) -> None:
        _expect_positive("batch", self, "max_tokens", "num_buckets", "max_len")
        if self.max_len > self.max_tokens:
            raise ValueError(
                f"batch.max_tokens: expected at least batch.max_len={self.max_len}, so that any pair fits, "
                f"got {self.max_tokens}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How gradients become steps: by default Adam with the Noam schedule (paper 5.3), and clipping by global norm."""

    name: Literal["adam", "adamw", "adafactor"] = "adam"
    """`adafactor` keeps a row and a column of second moments in the place of a matrix (Shazeer and Stern 2018), and has
    b1, b2 and eps of its own."""
    b1: float = 0.9
    b2: float = 0.98
    eps: float = 1e-9
    weight_decay: float = 0.0
    """Of adamw: decoupled, on matrices alone."""
    schedule: Literal["noam", "inverse_sqrt", "cosine", "constant"] = "noam"
    """All four begin with a linear warm-up."""
    noam_factor: float = 1.0
    """Multiplies the paper's learning rate."""
    learning_rate: float | None = None
    """The peak, of every schedule but noam, which has its own."""
    warmup_steps: int = 4_000
    decay_steps: int | None = None
    """The step at which cosine has reached its end: the run's last, as a rule."""
    final_share: float = 0.0
    """Of the peak, where cosine ends."""
    clip_norm: float | None = 1.0
    """Global norm to which gradients are scaled down; None leaves them."""
    ema_decay: float | None = None
    """If set, an exponential moving average of the parameters is kept beside them, and is what is evaluated."""

    def __post_init__(self) -> None:
        _expect_positive("optimizer", self, "eps", "noam_factor", "warmup_steps")
        for name in ("b1", "b2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"optimizer.{name}: expected a rate in [0, 1), got {getattr(self, name)}")
        if self.clip_norm is not None:
            _expect_positive("optimizer", self, "clip_norm")
        if self.ema_decay is not None and not 0.0 <= self.ema_decay < 1.0:
            raise ValueError(f"optimizer.ema_decay: expected a share in [0, 1), got {self.ema_decay}")
        if not self.weight_decay >= 0.0 or (self.weight_decay and self.name != "adamw"):
            raise ValueError(
                "optimizer.weight_decay: expected at least 0, and more only with optimizer.name='adamw', "
                f"got {self.weight_decay} with {self.name!r}"
            )
        self._check_schedule()

    def _check_schedule(self) -> None:
        if (self.learning_rate is None) != (self.schedule == "noam"):
            expected = "None with optimizer.schedule='noam'" if self.schedule == "noam" else "the peak"
            raise ValueError(
                f"optimizer.learning_rate: expected {expected}, got {self.learning_rate} with {self.schedule!r}"
            )
        if self.learning_rate is not None:
            _expect_positive("optimizer", self, "learning_rate")
        if (self.decay_steps is not None) != (self.schedule == "cosine"):
            expected = "the last step of the decay" if self.schedule == "cosine" else "None"
            raise ValueError(
                f"optimizer.decay_steps: expected {expected}, got {self.decay_steps} with {self.schedule!r}"
            )
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            raise ValueError(
                f"optimizer.decay_steps: expected more than warmup_steps={self.warmup_steps}, got {self.decay_steps}"
            )
        if not 0.0 <= self.final_share <= 1.0:
            raise ValueError(f"optimizer.final_share: expected a share in [0, 1], got {self.final_share}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """What is measured on held-out text, and how often."""

    every_epochs: int = 1
    """Validation loss after every so many epochs, and after the last step."""
    every_steps: int | None = None
    """And after every so many steps, for epochs that take days."""
    bleu_every_epochs: int | None = None
    """Greedy BLEU on the validation split after every so many epochs; None: only after the last."""
    metric: Literal["loss", "bleu"] = "loss"
    """Of two checkpoints the better one is that with the lower validation loss, or the higher BLEU."""
    patience: int | None = None
    """Stop when so many evaluations in a row have brought nothing better; None: never."""
    batch_size: int = 64
    """Sentences in a decoding batch."""
    max_decode_len: int = 128
    """Pieces of a translation, at most."""

    def __post_init__(self) -> None:
        _expect_positive("evaluation", self, "every_epochs", "batch_size", "max_decode_len")
        optional = ("every_steps", "bleu_every_epochs", "patience")
        _expect_positive("evaluation", self, *(name for name in optional if getattr(self, name) is not None))
        if self.metric == "bleu" and self.bleu_every_epochs is None:
            raise ValueError("evaluation.bleu_every_epochs: expected a number with evaluation.metric='bleu', got None")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the run is saved, and how much of it is kept."""

    every_steps: int = 500
    """Also saved after every evaluation."""
    keep: int = 3
    """Checkpoints kept, the newest ones; besides, the best one by `evaluation.metric`."""

    def __post_init__(self) -> None:
        _expect_positive("checkpoint", self, "every_steps", "keep")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """On which devices the steps run. Results do not depend on it, but for rounding; a continued run may change it."""

    mode: Literal["auto", "jit", "pmap"] = "auto"
    """`jit` over a mesh of devices, which is what `auto` means; `pmap`, one copy of the state a device."""
    num_devices: int | None = None
    """The first so many; None: all there are."""
    fsdp: int = 1
    """Devices, a divisor of their number, over which parameters and optimizer state are spread. Of jit only."""
    accumulation_steps: int = 1
    """Micro-batches into which the rows of a batch are cut, one after the other, to need less memory."""
    coordinator_address: str | None = None
    """`host:port` of process 0. Needed only where jax does not find out itself, as it does on Slurm, Kubernetes and
    Cloud TPU; then `num_processes` and `process_id` too."""
    num_processes: int | None = None
    process_id: int | None = None
    compile_cache: Path | None = Path("runs/cache/xla")
    """Folder of compiled programs, so that a run that is continued need not compile again."""

    def __post_init__(self) -> None:
        _expect_positive("parallel", self, "fsdp", "accumulation_steps")
        if self.num_devices is not None:
            _expect_positive("parallel", self, "num_devices")
            if self.num_devices % self.fsdp:
                raise ValueError(
                    f"parallel.fsdp: expected a divisor of num_devices={self.num_devices}, got {self.fsdp}"
                )
        if self.mode == "pmap" and self.fsdp > 1:
            raise ValueError(f"parallel.fsdp: expected 1 with parallel.mode='pmap', got {self.fsdp}")
        explicit = (self.coordinator_address, self.num_processes, self.process_id)
        if None in explicit and explicit != (None, None, None):
            raise ValueError(
                "parallel: expected coordinator_address, num_processes and process_id, all three or none, got "
                f"{self.coordinator_address!r}, {self.num_processes}, {self.process_id}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """What a run writes down besides its checkpoints."""

    log_every_steps: int = 20
    """A line of metrics.jsonl every so many steps."""
    tensorboard: bool = False
    """The same figures for TensorBoard, in `<run_dir>/tensorboard`."""
    profile_steps: int = 0
    """So many steps, after the first two, are traced for XProf or Perfetto into `<run_dir>/profile`."""

    def __post_init__(self) -> None:
        _expect_positive("report", self, "log_every_steps")
        if self.profile_steps < 0:
            raise ValueError(f"report.profile_steps: expected at least 0, got {self.profile_steps}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run. The vocabulary sizes of `model` are replaced by the tokenizer's once it is trained.

    Raises ValueError, naming the field, what was expected and what was given.
    """

    run_dir: Path
    """Folder of the run: config, tokenizer, checkpoints, metrics. An existing run there is continued."""
    init_from: Path | None = None
    """Folder of another run, such as an imported model: the new one starts with its parameters, and has its model, but
    for dropout, dtype and how attention is computed, its tokenizer and its search."""
    corpus: CorpusConfig = CorpusConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    model: TransformerConfig = dataclasses.field(default_factory=TransformerConfig)
    batch: BatchConfig = BatchConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    search: SearchConfig = dataclasses.field(default_factory=SearchConfig)
    checkpoint: CheckpointConfig = CheckpointConfig()
    parallel: ParallelConfig = ParallelConfig()
    report: ReportConfig = ReportConfig()
    label_smoothing: float = 0.1
    """Mass spread evenly over the whole vocabulary (paper 5.4)."""
    epochs: int = 20
    max_steps: int | None = None
    """Stop after so many steps, whatever the epoch."""
    seed: int = 0
    """Of initialisation, dropout and the order of batches."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ValueError(f"label_smoothing: expected a share in [0, 1), got {self.label_smoothing}")
        _expect_positive("train", self, "epochs")
        if self.seed < 0:
            raise ValueError(f"seed: expected at least 0, got {self.seed}")
        if self.max_steps is not None:
            _expect_positive("train", self, "max_steps")
        for name, expected in (("pad_id", PAD_ID), ("bos_id", BOS_ID), ("eos_id", EOS_ID)):
            if self.tokenizer.kind == "bpe" and getattr(self.model, name) != expected:
                raise ValueError(f"model.{name}: expected {expected}, the tokenizer's, got {getattr(self.model, name)}")
        limit = self.model.sequence_limit
        for name, length in (
            ("batch.max_len", self.batch.max_len),
            ("evaluation.max_decode_len", self.evaluation.max_decode_len),
        ):
            if limit is not None and length > limit:
                raise ValueError(f"{name}: expected at most the {limit} positions of the model's table, got {length}")

    def replace(self, **changes: Any) -> "TrainConfig":
        """A copy with some fields changed; validated again."""
        return dataclasses.replace(self, **changes)

    def with_vocabulary(self, size: int) -> "TrainConfig":
        """The same run with the model's vocabularies as large as the tokenizer's.

        An imported model's stay as they are: often they have been filled up to some round number.
        """
        if self.tokenizer.kind != "bpe":
            return self
        return self.replace(model=self.model.replace(src_vocab_size=size, tgt_vocab_size=size))

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON values, nested."""
        return _plain(dataclasses.asdict(self))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "TrainConfig":
        """The inverse of `to_dict`. Raises ValueError that names any field this version does not know."""
        return _from_plain(cls, values, "")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return str(value) if isinstance(value, Path) else value


def _from_plain(cls: type[T], values: Mapping[str, Any], prefix: str) -> T:
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(prefix + name for name in set(values) - set(fields))
    if unknown:
        raise ValueError(f"expected fields of {cls.__name__}, got unknown {', '.join(unknown)}")
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        kind = fields[name].type
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            arguments[name] = _from_plain(kind, value, f"{prefix}{name}.")
        elif value is not None and kind in (Path, Path | None):
            arguments[name] = Path(value)
        elif isinstance(value, list):
            arguments[name] = tuple(value)
        else:
            arguments[name] = value
    return cls(**arguments)
