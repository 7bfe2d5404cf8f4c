"""A run evaluated on one split of its corpus: translated, scored as text, and compared with another run."""

import dataclasses
import datetime
import hashlib
import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import sacrebleu
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from train.config import CorpusConfig, TrainConfig
from train.corpus import ParallelText, load_split, split_name
from train.evaluate import Scores, score
from train.run_dir import RunDir, recorded_versions, write_whole
from train.search import DEFAULT_SEARCH, Search, SearchOptions
from train.significance import BOOTSTRAP_SAMPLES, Difference, compare
from train.translate import LONGEST_SOURCE, TrainedRun, load_run
from train.translator import Translator
from transformer_config import BeamConfig, LengthConfig, SamplingConfig

KINDS = {LengthConfig: "greedy", BeamConfig: "beam", SamplingConfig: "sampling"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How well one run translates one text."""

    run: Path
    step: int
    """Of the newest checkpoint in use."""
    parameters: str
    """Which ones, in words."""
    devices: str
    split: str
    """As the corpus calls it."""
    languages: tuple[str, str]
    references: tuple[str, ...]
    hypotheses: tuple[str, ...]
    """In the order of the text, each without the end of a line in it."""
    scores: Scores
    length_ratio: float
    """Words of the translations to words of the references, as sacreBLEU's brevity penalty counts them."""
    unfinished: int
    """Translations that reached the limit on length before their end."""
    too_long: int
    """Sources with more pieces than are allowed; scored with an empty translation."""
    compilations: int
    max_compilations: int
    seconds: float
    """Of translation, compilation included."""

    def to_dict(self) -> dict[str, Any]:
        """All but the translations, as JSON has it."""
        names = {"bleu": "bleu", "bleu_lowercased": "bleu_lowercased", "chrf": "chrf2"}
        scores = {there: getattr(self.scores, here) for here, there in names.items()}
        plain = "step", "parameters", "devices", "unfinished", "too_long", "compilations", "max_compilations", "seconds"
        return {
            "run": str(self.run),
            "split": self.split,
            "languages": self.languages,
            "sentences": len(self.references),
            "references_sha256": hashlib.sha256("".join(f"{line}\n" for line in self.references).encode()).hexdigest(),
            "scores": scores | {"exact_match": self.scores.exact_match, "length_ratio": self.length_ratio},
            "signatures": {there: getattr(self.scores, f"{here}_signature") for here, there in names.items()},
            **{name: getattr(self, name) for name in plain},
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationReport:
    """Everything that was found, and how."""

    search: Search
    seed: int | None
    """Of sampling; None: nothing was drawn."""
    evaluations: tuple[Evaluation, ...]
    """Of the run, and of the one that it is compared with, if there is one."""
    differences: tuple[Difference, ...]
    """Of each metric; none without another run."""

    def to_json(self) -> str:
        """Scores, signatures, search, checkpoint and versions."""
        values = self.evaluations[0].to_dict() | {
            "search": {"kind": KINDS[type(self.search)]} | dataclasses.asdict(self.search) | {"seed": self.seed},
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "python": sys.version.split()[0],
            "versions": recorded_versions(),
        }
        for other in self.evaluations[1:]:
            differences = [dataclasses.asdict(each) | {"difference": each.difference} for each in self.differences]
            values |= {"against": other.to_dict(), "differences": differences}
        return json.dumps(values, indent=2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Candidate:
    """A run, loaded, and the text that it is to translate."""

    path: Path
    trained: TrainedRun
    parameters: str
    split: str
    text: ParallelText


def evaluate_run(
    run: Path,
    *,
    split: str = "test",
    options: SearchOptions = DEFAULT_SEARCH,
    batch_size: int | None = None,
    average_last: int | None = None,
    ema: bool = False,
    num_devices: int | None = 1,
    against: Path | None = None,
    output: Path | None = None,
    data: Path | None = None,
    console: Console,
) -> EvaluationReport:
    """Translates a split of the run's corpus, scores it, and writes the translations and, beside them, a JSON.

    `split` is the corpus's own name or a role, `validation` or `test`. The run `against` is evaluated on its own corpus
    with the same search, and its translations are written too, as FILE.against. `data` is the folder of both corpora
    instead of the ones in the configs.

    Raises FileNotFoundError or ValueError for what is missing or cannot be, before anything is translated.
    """
    _check_options(options, average_last=average_last, ema=ema)
    paths = [path for path in (run, against) if path is not None]
    every = [load_run(path, average_last=average_last, ema=ema, num_devices=num_devices) for path in paths]
    candidates = [
        _candidate(path, trained.with_batch_size(batch_size), split=split, data=data, average_last=average_last)
        for path, trained in zip(paths, every, strict=True)
    ]
    first, config = candidates[0], candidates[0].trained.config
    for other in candidates[1:]:
        _check_same_references(first, other)
    # A slice of a split has brackets in its name, a split in a folder within the folder a slash.
    file_name = f"{re.sub('[^-.a-zA-Z0-9_]', '_', first.split)}.{config.corpus.target_language}.txt"
    output = output or run / "hypotheses" / file_name
    if output.is_dir():
        raise ValueError(f"--output: expected a file, got the folder {output}")
    # One search for all, with the limit on length of the first; a model with fewer positions lowers it for itself.
    max_len = min(config.evaluation.max_decode_len, _longest_source(first.trained))
    search = options.search(max_len=max_len, run=config.search)
    seed = options.seed if isinstance(search, SamplingConfig) else None
    console.print(f"Search: {_in_words(search, seed=seed)}.")
    output.parent.mkdir(parents=True, exist_ok=True)  # where that cannot be, nobody waits for translations first
    evaluations = tuple(
        _evaluate(each, search=_with_its_ids(search, each.trained.config), seed=seed, console=console)
        for each in candidates
    )
    differences = compare(*(each.hypotheses for each in evaluations), references=first.text.target) if against else ()
    report = EvaluationReport(search=search, seed=seed, evaluations=evaluations, differences=differences)
    show_evaluation(console, report)
    for file in _write(report, output):
        console.print(Text(f"Written: {file}"), soft_wrap=True)
    return report


def _with_its_ids(search: Search, config: TrainConfig) -> Search:
    """The same search with what a model's own vocabulary has to be: ids never chosen, tags of languages."""
    return dataclasses.replace(search, **config.search.of_vocabulary)


def _check_options(options: SearchOptions, *, average_last: int | None, ema: bool) -> None:
    if options.nbest != 1:
        raise ValueError(f"--nbest: expected 1, the one translation of a line that is scored, got {options.nbest}")
    if average_last is not None and (average_last < 1 or ema):
        raise ValueError(f"--average-last: expected at least 1, no --ema, got {average_last}{' --ema' if ema else ''}")


def _candidate(
    path: Path, trained: TrainedRun, *, split: str, data: Path | None, average_last: int | None
) -> _Candidate:
    corpus, name = trained.config.corpus, split_name(trained.config.corpus, split)
    try:
        text = load_split(_elsewhere(corpus, data), name)
        if not any(line.strip() for line in text.target):
            raise ValueError(f"expected references to score with, got {len(text)} lines without words")
    except (ValueError, FileNotFoundError) as error:
        folder = corpus.path if data is None and corpus.kind in ("files", "iwslt") else None
        hint = "; if it was moved: --data FOLDER" if folder is not None and not folder.is_dir() else ""
        raise ValueError(f"{path}, --split {split}: {error}{hint}") from error
    averaged = (RunDir(path).checkpoints / str(trained.step) / "ema").is_dir()  # what load_run takes by default
    newest = "moving average" if averaged else "newest checkpoint"
    parameters = newest if average_last is None else f"average of the {average_last} newest checkpoints"
    return _Candidate(path=path, trained=trained, parameters=parameters, split=name, text=text)


def _elsewhere(corpus: CorpusConfig, data: Path | None) -> CorpusConfig:
    """The corpus in the folder `data`, if it is given."""
    if data is None:
        return corpus
    if corpus.kind == "demo":
        raise ValueError(f"--data: expected none with corpus.kind='demo', which is built and not read, got {data}")
    if not data.is_dir():
        raise ValueError(f"--data: expected a folder, got {data}")
    return dataclasses.replace(corpus, **{"hub": str(data)} if corpus.kind == "hub" else {"path": data})


def _check_same_references(first: _Candidate, other: _Candidate) -> None:
    ours, theirs = first.text.target, other.text.target
    if ours == theirs:
        return
    how = f"{len(theirs)} sentences, not {len(ours)}"
    if len(ours) == len(theirs):
        number = next(i for i in range(len(ours)) if ours[i] != theirs[i])
        how = f"sentence {number + 1} is {theirs[number]!r}, not {ours[number]!r}"
    raise ValueError(
        f"--against {other.path}: expected the references of {first.split} of {first.path}, got others in "
        f"{other.split}: {how}"
    )


def _longest_source(trained: TrainedRun) -> int:
    return trained.config.model.sequence_limit or LONGEST_SOURCE


def _evaluate(candidate: _Candidate, *, search: Search, seed: int | None, console: Console) -> Evaluation:
    """Translates and scores; says how it went, and on standard error what was cut."""
    trained, text = candidate.trained, candidate.text
    stderr, longest = Console(stderr=True), _longest_source(trained)
    columns = (TextColumn("translating"), BarColumn(), MofNCompleteColumn(), TextColumn("lines"), TimeElapsedColumn())
    console.print(Text(f"Run {candidate.path}: step {trained.step:,}, {candidate.parameters}."), soft_wrap=True)
    started = time.perf_counter()
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as progress:
        task = progress.add_task("", total=len(text))
        translator = Translator(
            trained.config,
            trained.tokenizer,
            trained.devices,
            search=search,
            seed=seed or 0,
            progress=lambda lines: progress.advance(task, lines),
        )
        found = translator.translate(trained.params, text.source, longest=longest)
    seconds = time.perf_counter() - started
    compiled = f"{translator.compilations} shapes compiled (at most {translator.max_compilations})"
    console.print(f"{len(text):,} lines translated in {seconds:.1f} s with {compiled}.")
    too_long = f"not translated, expected at most {longest} pieces"
    for what, lines in (("cut at the limit on length", found.unfinished), (too_long, found.too_long)):
        if lines:
            print(f"warning: {candidate.path}: {len(lines)} of {len(text)} lines {what}", file=sys.stderr)
    # A line stays a line, whatever the model makes of it; what is scored is what is written.
    hypotheses = tuple(line.replace("\n", " ").replace("\r", " ") for line in found.lines)
    words = sacrebleu.BLEU().corpus_score(hypotheses, [text.target])
    return Evaluation(
        run=candidate.path,
        step=trained.step,
        parameters=candidate.parameters,
        devices=str(trained.devices),
        split=candidate.split,
        languages=(trained.config.corpus.source_language, trained.config.corpus.target_language),
        references=text.target,
        hypotheses=hypotheses,
        scores=score(hypotheses, text.target),
        length_ratio=words.sys_len / words.ref_len,
        unfinished=len(found.unfinished),
        too_long=len(found.too_long),
        compilations=translator.compilations,
        max_compilations=translator.max_compilations,
        seconds=seconds,
    )


def _write(report: EvaluationReport, output: Path) -> tuple[Path, ...]:
    files = {output: report.evaluations[0].hypotheses}
    files |= {output.with_name(f"{output.name}.against"): other.hypotheses for other in report.evaluations[1:]}
    for file, lines in files.items():
        write_whole(file, "".join(f"{line}\n" for line in lines))
    write_whole(about := output.with_name(f"{output.name}.json"), report.to_json() + "\n")
    return *files, about


def _in_words(search: Search, *, seed: int | None) -> str:
    own = {field.name for field in dataclasses.fields(LengthConfig)}
    options = dataclasses.asdict(search)
    ordered = sorted(options, key=own.__contains__)  # what only this search has comes first
    said = [f"{name}={options[name]}" for name in ordered if options[name] not in (None, 0) and "num_" not in name]
    return ", ".join([KINDS[type(search)], *said, *([] if seed is None else [f"seed={seed}"])])


def show_evaluation(console: Console, report: EvaluationReport) -> None:
    """Scores with their signatures, and the differences between two runs with theirs."""
    first, names = report.evaluations[0], [each.run.resolve().name for each in report.evaluations]
    if len(set(names)) < len(names):
        names = [str(each.run) for each in report.evaluations]
    languages = "-".join(first.languages)
    table = Table(title=Text(f"Split {first.split}, {languages}: {len(first.references):,} sentences"))
    table.add_column("run", overflow="fold")
    for heading in ("BLEU cased", "BLEU lowercased", "chrF2", "exact match", "length ratio"):
        table.add_column(heading, justify="right")
    for name, evaluation in zip(names, report.evaluations, strict=True):
        scores = evaluation.scores
        numbers = [f"{value:.2f}" for value in (scores.bleu, scores.bleu_lowercased, scores.chrf)]
        table.add_row(Text(name), *numbers, f"{scores.exact_match:.1%}", f"{evaluation.length_ratio:.3f}")
    console.print(table)
    signatures = first.to_dict()["signatures"]
    _show_signatures(console, dict(zip(("cased", "lowercased", "chrF2"), signatures.values(), strict=True)))
    if report.differences:
        _show_differences(console, report.differences, names=names, sentences=len(first.references))


def _show_differences(
    console: Console, differences: Sequence[Difference], *, names: Sequence[str], sentences: int
) -> None:
    title = f"Paired bootstrap: {BOOTSTRAP_SAMPLES:,} samples of {sentences:,} sentences"
    table = Table(title=title, caption="p: how likely so large a difference is if neither run is better")
    table.add_column("metric")
    table.add_column("run", overflow="fold")
    for heading in ("score", "95% interval", "difference", "p"):
        table.add_column(heading, justify="right")
    for each in differences:
        low, high = each.interval
        changed = (f"{each.difference:+.2f}", f"{each.p_value:.4f}")
        table.add_row(each.metric, Text(names[0]), f"{each.score:.2f}", f"{low:.2f} to {high:.2f}", *changed)
        low, high = each.against_interval
        table.add_row("", Text(names[1]), f"{each.against_score:.2f}", f"{low:.2f} to {high:.2f}", end_section=True)
    console.print(table)
    _show_signatures(console, {each.metric: each.signature for each in differences})


def _show_signatures(console: Console, signatures: Mapping[str, str]) -> None:
    console.print(Text("\n".join(f"{name + ':':<12}{signature}" for name, signature in signatures.items())))
