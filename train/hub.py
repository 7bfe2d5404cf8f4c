"""Corpora of the Hugging Face hub, by its library `datasets`: Arrow files, mapped into memory, read in small batches.

Two layouts are known: a column `translation` of dicts, one sentence a language (wmt/wmt14), and a column for each
language (bentrevett/multi30k). Code that comes with a corpus is never run. Where a corpus is nothing but such a script
(IWSLT/iwslt2017), the hub has converted it: its branch `refs/convert/parquet` holds `<config>/<split>/0000.parquet`.
"""

import functools
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from train.config import CorpusConfig
from train.readers import TRANSLATION, Pair, PairSource

ROWS = 1_000
"""In memory at a time."""
SPLIT_NAME = re.compile(r"\w+(\.\w+)*")
"""What the library takes for one; other folders of a converted branch (`partial-train`) are none."""


def find_splits(config: CorpusConfig, names: Sequence[str]) -> list[PairSource]:
    """Splits of `config.hub`, a dataset's name on the hub or a folder laid out like one; downloaded where need be.

    A name may be a slice, as the library writes it: `train[:10%]`. Files are kept where the library keeps them, in
    HF_HOME; from there a corpus that was loaded once is read offline (HF_HUB_OFFLINE=1) and when the hub is down. The
    library then takes the newest copy it has, of whatever revision, except from the converted branch.

    Raises FileNotFoundError if it is out of reach or not there, and says what to do; ValueError if it cannot be used:
    a script, no such config or split, not these languages; either names the corpus.
    """
    builder = _prepared_builder(config)
    return [_split(builder, name, config) for name in names]


def _prepared_builder(config: CorpusConfig) -> Any:
    try:
        import datasets
        from datasets.exceptions import DatasetsError
        from huggingface_hub.errors import HfHubHTTPError
        from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # whichever client it talks with
    except ModuleNotFoundError as error:
        raise ValueError(
            f"expected the library datasets, to load {_named(config)}, got {error}; pip install 'twinformer[data]'"
        ) from error
    try:
        if config.hub_is_converted:
            builder = datasets.load_dataset_builder("parquet", data_files=_converted_files(config))
        else:
            builder = datasets.load_dataset_builder(config.hub, config.hub_config, revision=config.hub_revision)
        builder.download_and_prepare()
    except (ConnectionError, FileNotFoundError, TimeoutError, HfHubHTTPError, httpx.HTTPError) as error:
        raise FileNotFoundError(_out_of_reach(config, error)) from error
    except RuntimeError as error:
        if "scripts are no longer supported" not in str(error):
            raise
        raise ValueError(_script(config, error)) from error
    except (ValueError, DatasetsError) as error:  # no such config, or files that are damaged or do not fit together
        cause = f" ({error.__cause__})" if error.__cause__ else ""
        raise ValueError(f"{_named(config)}: {error}{cause}") from error
    return builder


def _converted_files(config: CorpusConfig) -> dict[str, list[str]]:
    """Of every split. The files are fetched first, by name: the library's own copies of a branch that is addressed by
    folder are found again only online, and it would take `test_2016` and `test_2017` for one split."""
    from huggingface_hub import snapshot_download

    root = str(config.hub)
    if not os.path.isdir(root):
        pattern = f"{config.hub_config}/*"
        root = snapshot_download(root, repo_type="dataset", revision=config.hub_revision, allow_patterns=pattern)
    folder = Path(root, str(config.hub_config))
    files: dict[str, list[str]] = {}
    for file in sorted(folder.glob("*/*.parquet")):
        if SPLIT_NAME.fullmatch(file.parent.name):
            files.setdefault(file.parent.name, []).append(str(file))
    if not files:
        raise ValueError(
            f"expected files <split>/0000.parquet in {config.hub_config}, corpus.hub_config, of {_named(config)}, "
            f"got none; what there is: {_converted_page(config)}"
        )
    return files


def _split(builder: Any, name: str, config: CorpusConfig) -> PairSource:
    try:
        dataset = builder.as_dataset(split=name)
    except (ValueError, KeyError, AssertionError) as error:  # unknown, or no slice
        known = ", ".join(map(str, builder.info.splits or ()))
        raise ValueError(f"expected a split of {_named(config)}, which has {known}, got {name!r}") from error
    columns = _columns(dataset.features.arrow_schema, config)
    chosen = dataset.select_columns(sorted({column.partition(".")[0] for column in columns})).with_format("arrow")
    files = tuple(Path(entry["filename"]) for entry in dataset.cache_files)
    return PairSource(name=name, files=files, read=functools.partial(_read, chosen, columns))


def _columns(schema: Any, config: CorpusConfig) -> tuple[str, str]:
    """Names of the source's and the target's column, once structs are flattened."""
    from pyarrow import types

    inside = TRANSLATION in schema.names and types.is_struct(schema.field(TRANSLATION).type)
    fields = {field.name: field.type for field in (schema.field(TRANSLATION).flatten() if inside else schema)}
    columns = [f"{TRANSLATION}.{language}" if inside else language for language in _languages(config)]
    if not set(columns) <= set(fields):
        found = f"the columns {', '.join(schema.names)}"
        if inside:
            found += f" with {', '.join(name.partition('.')[2] for name in fields)} in {TRANSLATION}"
        languages = " and ".join(map(repr, _languages(config)))
        raise ValueError(f"expected the languages {languages} in {_named(config)}, got {found}")
    for column in columns:
        if not (types.is_string(fields[column]) or types.is_large_string(fields[column])):
            raise ValueError(f"expected text in the column {column!r} of {_named(config)}, got {fields[column]}")
    return columns[0], columns[1]


def _read(dataset: Any, columns: tuple[str, str]) -> Iterator[Pair]:
    for table in dataset.iter(batch_size=ROWS):
        flat = table.flatten()
        sides = (flat[column].to_pylist() for column in columns)
        for source, target in zip(*sides, strict=True):
            yield source or "", target or ""  # a null is an empty sentence, as in files


def _languages(config: CorpusConfig) -> tuple[str, str]:
    return config.source_language, config.target_language


def _named(config: CorpusConfig) -> str:
    details = {"config": config.hub_config, "revision": config.hub_revision}
    given = ", ".join(f"{what} {value}" for what, value in details.items() if value is not None)
    return f"the corpus {config.hub!r}" + (f" ({given})" if given else "")


def _converted_page(config: CorpusConfig) -> str:
    return f"https://huggingface.co/datasets/{config.hub}/tree/refs%2Fconvert%2Fparquet"


def _out_of_reach(config: CorpusConfig, error: Exception) -> str:
    return (
        f"expected {_named(config)} on the Hugging Face hub, in its cache or as a folder, "
        f"got {type(error).__name__}: {error}\n"
        "Offline: load it once on a machine with a network, and copy HF_HOME (~/.cache/huggingface) from there; or "
        "download its Parquet files there (hf download NAME --repo-type dataset --local-dir FOLDER), and give the "
        "folder for the name, corpus.hub=FOLDER, or use corpus.kind=files, path=FOLDER if each split is one file there"
    )


def _script(config: CorpusConfig, error: Exception) -> str:
    return (
        f"expected files of data in {_named(config)}, got a script, and none is ever run ({error}). The hub may have "
        "it converted: corpus.hub_revision=refs/convert/parquet, and corpus.hub_config=FOLDER of that branch, "
        f"{_converted_page(config)}; or download the data by hand, and use corpus.kind=files (or iwslt), path=FOLDER"
    )
