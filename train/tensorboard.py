"""The metrics of a run as event files, which TensorBoard shows while it goes on."""

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

_FLUSH_SECONDS = 30


class TensorBoard:
    """Event files in a folder: what is in a record of metrics.jsonl, as scalars.

    Where tensorboardX is not installed, raises ValueError that names the extra.
    """

    def __init__(self, folder: Path, *, step: int = 0):
        """`step` is where the run stands; scalars beyond it, by a process that was killed, are no longer shown."""
        # tensorboardX names files by the second: a run continued within one would overwrite its own file. Nanoseconds
        # have as many digits all the time, so that names, by which TensorBoard reads the files, stay in order.
        self._writer = _summary_writer()(
            str(folder), purge_step=step + 1, flush_secs=_FLUSH_SECONDS, filename_suffix=f".{time.time_ns()}"
        )

    def __enter__(self) -> "TensorBoard":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def write(self, record: Mapping[str, Any]) -> None:
        """Every number of `record` as a scalar `kind/field` at the record's step; signatures are no numbers."""
        for field, value in record.items():
            if field != "step" and isinstance(value, (int, float)) and not isinstance(value, bool):
                self._writer.add_scalar(f"{record['kind']}/{field}", value, record["step"])

    def close(self) -> None:
        """Writes what has not been written yet."""
        self._writer.close()


def _summary_writer() -> Any:
    try:
        with _without_torch():
            from tensorboardX import SummaryWriter
    except ModuleNotFoundError as error:
        raise ValueError("expected tensorboardX for event files; pip install 'twinformer[tensorboard]'") from error
    return SummaryWriter


@contextlib.contextmanager
def _without_torch() -> Iterator[None]:
    """Lets `import torch` fail meanwhile, unless torch has been imported already.

    tensorboardX imports torch wherever it is installed, for a type annotation, and does without where it is not. The
    trainer never imports it: it takes seconds, hundreds of MB, and threads that then share the cores with jax. None in
    sys.modules is Python's own way to say that a module is not there.
    """
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["torch"]
