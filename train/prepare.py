"""What a run needs before its first step: the corpus as ids, the tokenizer, and the shapes of batches."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator

from rich.console import Console

from train.batching import Bucket, Plan, drop_long, epoch_batches, extend_buckets, plan_buckets
from train.bpe import BPETokenizer
from train.checkpoint import Checkpoints
from train.config import TrainConfig
from train.corpus import Corpus, load_corpus
from train.display import encoding
from train.init_from import tokenizer_text
from train.packing import packed_epoch, plan_packing
from train.parallel import is_main_process, wait_for_all
from train.run_dir import RunDir, write_whole
from train.sentences import EncodedText, encode_text, encode_to_disk
from train.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedData:
    """The corpus as ids, and the shapes its batches have."""

    corpus: Corpus
    tokenizer: Tokenizer
    train: EncodedText
    validation: EncodedText
    packed: bool
    """Whether rows of the training batches hold several pairs."""
    shapes: tuple[Bucket, ...]
    """Of the training batches."""
    buckets: tuple[Bucket, ...]
    """Of the validation batches, whose rows hold one pair each."""
    epoch: Callable[[int], Plan]
    """The batches of an epoch: equally many in every one. Keeps the two newest plans."""
    notes: tuple[str, ...]


def prepare(config: TrainConfig, run_dir: RunDir, *, console: Console) -> PreparedData:
    """Loads the corpus, learns the tokenizer or takes the run's own, and plans the shapes of batches.

    Where there are several processes the first makes the files that all of them read.
    """
    with _main_process_first():
        corpus = load_corpus(config.corpus)
        run_dir.pin_corpus(corpus.train.sha256)
        if run_dir.tokenizer_file.exists():
            tokenizer = run_dir.tokenizer()
        elif (adopted := tokenizer_text(config)) is not None:
            write_whole(run_dir.tokenizer_file, adopted)
            tokenizer = run_dir.tokenizer()
        elif config.tokenizer.kind != "bpe":
            raise ValueError(
                f"tokenizer.kind: expected 'bpe' where no init_from brings another, got {config.tokenizer.kind!r}"
            )
        else:
            tokenizer = BPETokenizer.train(itertools.chain.from_iterable(corpus.train), config.tokenizer)
            tokenizer.save(run_dir.tokenizer_file)
        tokenizer.expect_model(config.model)
        with encoding(console, total=len(corpus.train)) as progress:
            folder = config.corpus.cache / f"{corpus.train.sha256[:16]}-{tokenizer.sha256[:16]}"
            encoded = encode_to_disk(corpus.train, tokenizer, folder, progress=progress)
    train, dropped = drop_long(encoded, max_len=config.batch.max_len)
    validation = encode_text(corpus.validation, tokenizer)
    shapes, epoch = _plans(train, config)
    return PreparedData(
        corpus=corpus,
        tokenizer=tokenizer,
        train=train,
        validation=validation,
        packed=config.batch.packing,
        shapes=shapes,
        buckets=plan_buckets(validation, config=config.batch)
        if config.batch.packing
        else extend_buckets(validation, shapes),
        epoch=epoch,
        notes=(*corpus.notes, str(dropped)) if dropped else corpus.notes,
    )


def restore_tokenizer(run_dir: RunDir, checkpoints: Checkpoints) -> None:
    """A tokenizer that has gone comes from the newest checkpoint: one learned anew may be another.

    Raises ValueError if that checkpoint cannot be read.
    """
    latest = checkpoints.latest_step()
    if latest is None:
        return
    record = checkpoints.record(latest)  # in every process: Orbax has them wait for each other
    if is_main_process() and not run_dir.tokenizer_file.exists():
        write_whole(run_dir.tokenizer_file, record.tokenizer)


def _plans(train: EncodedText, config: TrainConfig) -> tuple[tuple[Bucket, ...], Callable[[int], Plan]]:
    seed = config.seed
    if config.batch.packing:
        rows = plan_packing(train, config=config.batch)
        return (rows.shape,), functools.lru_cache(2)(lambda epoch: packed_epoch(train, rows, seed=seed, epoch=epoch))
    buckets = plan_buckets(train, config=config.batch)
    return buckets, functools.lru_cache(2)(lambda epoch: epoch_batches(train, buckets, seed=seed, epoch=epoch))


@contextlib.contextmanager
def _main_process_first() -> Iterator[None]:
    if is_main_process():
        yield
        wait_for_all("files made")
    else:
        wait_for_all("files made")
        yield
