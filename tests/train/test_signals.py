"""SIGTERM and SIGINT: the run saves and stops, and the same command goes on; the second one interrupts at once."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.train.conftest import Ended, metrics, saved, start, steps_saved, train
from train.signals import StopRequest

PAUSE = """
from pathlib import Path
from train.loop import Trainer
take = Trainer._take
def paused(self, made, progress):
    take(self, made, progress)
    if self.step == {step}:
        Path({here!r}).touch()
        until = time.monotonic() + 60
        while time.monotonic() < until and ({twice} or self.stop.requested is None):
            time.sleep(0.01)
Trainer._take = paused
"""


def stop(config, tmp_path: Path, *, step: int, number: signal.Signals, twice: bool = False) -> tuple[int, str]:
    """Sends the signal when that step has been computed, again if so; exit status and what was printed."""
    here, log = tmp_path / "here", tmp_path / "log"
    with start(config, log, before=PAUSE.format(step=step, here=str(here), twice=twice)) as process:
        try:
            until = time.monotonic() + 120
            while not here.exists():
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < until, log.read_text()
                time.sleep(0.01)
            here.unlink()
            process.send_signal(number)
            if twice:
                time.sleep(0.3)
                assert process.poll() is None, "the first one only asks"
                process.send_signal(number)
            return process.wait(timeout=60), " ".join(log.read_text().split())
        finally:
            process.kill()


def test_stopped_by_signals_and_continued_ends_bit_identical(tiny_run, tmp_path: Path, whole: Ended) -> None:
    config = tiny_run(tmp_path / "run")
    status, printed = stop(config, tmp_path, step=2, number=signal.SIGTERM)
    assert (status, steps_saved(config.run_dir)) == (3, [2]), printed
    assert printed.endswith(f"{config.run_dir}: stopped and saved at step 2; the same command continues")
    assert "Traceback" not in printed

    status, printed = stop(config, tmp_path, step=5, number=signal.SIGINT, twice=True)
    assert status == 130, printed
    assert "Continuing from step 2, epoch 1, batch 2." in printed
    assert printed.endswith("Interrupted. The same command continues from the last checkpoint.")
    assert "Traceback" not in printed
    assert steps_saved(config.run_dir) == [2, 3]

    status, printed = stop(config, tmp_path, step=6, number=signal.SIGINT)  # where an evaluation is due
    assert (status, saved(config)[:2]) == (3, (6, None)), printed
    assert "Continuing from step 3, epoch 1, batch 3." in printed
    assert "saved at step 6" in printed

    result, shown = train(config)
    assert "Continuing from step 6, epoch 2, batch 0." in shown
    assert result == whole.result
    assert saved(config) == saved(whole.config)
    assert metrics(config.run_dir) == metrics(whole.config.run_dir)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_is_remembered_and_the_second_interrupts(number: signal.Signals) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), StopRequest() as request:  # noqa: PT012
        assert request.requested is None
        os.kill(os.getpid(), number)
        assert request.requested is number
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("not interrupted")
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_outside_of_the_main_thread_nothing_is_changed() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen: list[object] = []

    def enter() -> None:
        with StopRequest() as request:
            seen.append(request.requested)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [None]
    assert signal.getsignal(signal.SIGINT) is before
