"""The signals of a service: SIGUSR1 writes the stacks of threads that run, and does no harm."""

from __future__ import annotations

import fcntl
import signal
import subprocess
import sys
import termios
import threading
import time
from array import array
from pathlib import Path
from typing import IO, Final

from tests.waiting import PROCESS_S, WAIT_S, wait_until

SIGNALS: Final = 300
PAUSE_S: Final = 0.002
PIPE_BYTES: Final = 1 << 16

PROGRAM: Final = """
import itertools
import sys
import threading
from pybk.admin.signals import STOPS, Signals

def descend(frames):
    return [descend(frames - 1) for _ in range(1)] if frames else []

ended = threading.Event()

def work():
    for number in itertools.count():
        if ended.is_set():
            return
        eval(compile("[descend(frames) for frames in (3, 30, 200)]", f"code {number}", "eval"), globals())

sys.setswitchinterval(0.0001)
signals = Signals()
threads = [threading.Thread(target=work, daemon=True) for _ in range(6)]
for each in threads:
    each.start()
print("works", flush=True)
while signals.wait() not in STOPS:
    pass
ended.set()
for each in threads:
    each.join()
"""


BEATING: Final = """
import sys
import threading
import time
from pybk.admin.signals import STOPS, Signals

def beat():
    while True:
        print("beat", flush=True)
        time.sleep(0.01)

signals = Signals()
for _ in range(50):
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
threading.Thread(target=beat, daemon=True).start()
while signals.wait() not in STOPS:
    pass
"""


def test_threads_continue_while_nobody_reads_the_stacks() -> None:
    """The pipe of the standard error is full after some signals, and the main thread waits for its reader."""
    with subprocess.Popen([sys.executable, "-c", BEATING], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            too_late = threading.Timer(PROCESS_S, process.kill)
            too_late.start()
            for number in range(300):
                assert process.stdout.readline() == b"beat\n", f"no thread runs after {number} signals"
                process.send_signal(signal.SIGUSR1)
            too_late.cancel()
            assert waiting_bytes(process.stderr) > PIPE_BYTES // 2
        finally:
            process.kill()


def waiting_bytes(pipe: IO[bytes]) -> int:
    """Return how many bytes of a pipe nobody has read."""
    size = array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, size)
    return size[0]


def test_a_service_whose_threads_run_survives_the_writing_of_its_stacks(tmp_path: Path) -> None:
    written = tmp_path / "stacks"
    with (
        open(written, "wb") as stacks,
        subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=stacks) as process,
    ):
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"works\n"
            for number in range(SIGNALS):
                assert process.poll() is None, f"it ended after {number} signals"
                process.send_signal(signal.SIGUSR1)
                time.sleep(PAUSE_S)
            wait_until(lambda: b"Current thread" in written.read_bytes())
            assert b"in descend" in written.read_bytes()
            process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT_S) == 0
        finally:
            process.kill()
