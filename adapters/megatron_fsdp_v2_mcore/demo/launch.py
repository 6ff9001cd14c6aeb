"""Start the ranks, follow their log, and leave none of them behind."""

import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TextIO

import psutil

POLL_SECONDS = 0.2
GRACE_SECONDS = 5.0
SHOWN_LINES = 15
ROOT_CAUSE = re.compile(r"Root Cause.*?\brank\s*:\s*(?P<rank>\d+)\b.*?exitcode\s*:\s*(?P<code>-?\d+)", re.DOTALL)
ARGPARSE_ERROR = re.compile(r"\S+: error: ")


class RunFailed(Exception):
    """A process of the run ended with an error; the message names it and carries its last lines."""


def choose_port(wanted: int) -> int:
    """A free TCP port on 127.0.0.1: ``wanted``, or any when that is 0.

    Raises:
        OSError: ``wanted`` is taken or not allowed.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", wanted))
        return probe.getsockname()[1]


def loopback_interface() -> str | None:
    """Name of the loopback network interface, None where it can't be told."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)


def run(command: list[str], env: dict[str, str], folder: Path, ranks: int, on_line: Callable[[str], object]) -> None:
    """Run ``command`` to its end, passing the lines that the first and the last rank print to ``on_line``.

    ``on_line("")`` is called when nothing new came, so that a display can live on. However this function is left,
    no process that it started stays.

    Raises:
        RunFailed: the launcher or a rank ended with an error.
    """
    launcher_log = folder / "launcher.log"
    with launcher_log.open("w") as log, _termination_as_interrupt():
        process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            for line in _follow(process, folder / "ranks", {0, ranks - 1}):
                on_line(line)
        finally:
            stop(process)
    if process.returncode != 0:
        raise RunFailed(explain_failure(folder, process.returncode))


def run_quietly(command: list[str], env: dict[str, str], log: Path) -> None:
    """Run one process to its end with its output in ``log``; Ctrl-C ends it too.

    Raises:
        RunFailed: it ended with an error.
    """
    with log.open("w") as output, _termination_as_interrupt():
        code = subprocess.run(command, env=env, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
    if code != 0:
        raise RunFailed(f"{' '.join(command)} ended with exit code {code}. Its last lines:\n{_tail(log.read_text())}")


def stop(process: subprocess.Popen[bytes]) -> None:
    """End ``process`` and everything below it: asked first, killed after ``GRACE_SECONDS``."""
    if process.poll() is not None:
        return
    with _handling(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # torchrun puts every rank in a session of its own, so no signal to a group reaches them all.
        ranks = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for rank in ranks:
            _kill_family(rank)


def rank_log(ranks_folder: Path, rank: int, stream: str) -> Path | None:
    """The file with the ``stdout`` or ``stderr`` of ``rank``, None while there is none."""
    return next(iter(sorted(ranks_folder.glob(f"*/attempt_*/{rank}/{stream}.log"))), None)


def explain_failure(folder: Path, code: int) -> str:
    """Which rank failed first, and the last lines it printed."""
    report = (folder / "launcher.log").read_text(errors="replace")
    cause = ROOT_CAUSE.search(report)
    if cause is None:
        return f"The launcher ended with exit code {code}. Its last lines:\n{_tail(report)}"
    rank, status = int(cause["rank"]), int(cause["code"])
    ending = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"failed with exit code {status}"
    return f"Rank {rank} {ending}. {_last_words(folder / 'ranks', rank)}"


def _last_words(ranks_folder: Path, failed: int) -> str:
    """The failed rank's last lines, or another's where it left the explanation to that one."""
    others = sorted({int(path.name) for path in ranks_folder.glob("*/attempt_*/*")} - {failed})
    for rank in (failed, *others):
        for stream in ("stderr", "stdout"):
            path = rank_log(ranks_folder, rank, stream)
            if path and (printed := _tail(path.read_text(errors="replace"))):
                return f"Last lines of rank {rank}:\n{printed}"
    return "No rank printed anything."


def _tail(text: str) -> str:
    lines = text.strip().splitlines()
    # argparse says what is wrong in its last line, below hundreds that list every flag.
    shown = 1 if lines and ARGPARSE_ERROR.match(lines[-1]) else SHOWN_LINES
    return "\n".join(lines[-shown:])


def _follow(process: subprocess.Popen[bytes], ranks_folder: Path, ranks: set[int]) -> Iterator[str]:
    """Lines that the ranks print, as they come; an empty one whenever there is nothing new."""
    readers = [_RankOutput(ranks_folder, rank) for rank in sorted(ranks)]
    try:
        ended = False
        while not ended:
            ended = process.poll() is not None
            for reader in readers:
                yield from reader.new_lines()
            yield ""
            if not ended:
                time.sleep(POLL_SECONDS)
    finally:
        for reader in readers:
            reader.close()


class _RankOutput:
    """Reads what a rank's standard output gained since the last look."""

    def __init__(self, ranks_folder: Path, rank: int) -> None:
        self.find = lambda: rank_log(ranks_folder, rank, "stdout")
        self.file: TextIO | None = None
        self.rest = ""

    def new_lines(self) -> list[str]:
        if self.file is None and (path := self.find()):
            self.file = path.open(errors="replace")
        chunk = self.file.read() if self.file else ""
        *lines, self.rest = (self.rest + chunk).split("\n")
        return [line for line in lines if line]

    def close(self) -> None:
        if self.file:
            self.file.close()


def _termination_as_interrupt() -> AbstractContextManager[None]:
    """SIGTERM and a closed terminal end the run the way Ctrl-C does."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    return _handling(interrupt, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def _handling(handler: Callable[[int, object], None] | signal.Handlers, *numbers: signal.Signals) -> Iterator[None]:
    previous = [signal.signal(number, handler) for number in numbers]
    try:
        yield
    finally:
        for number, before in zip(numbers, previous, strict=True):
            signal.signal(number, before)


def _kill_family(process: psutil.Process) -> None:
    try:
        for descendant in (*process.children(recursive=True), process):
            descendant.kill()
    except psutil.NoSuchProcess:
        pass
