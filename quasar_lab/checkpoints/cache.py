"""The folder that keeps fetched models, and how to fill it so that nothing is ever half-written.

Work happens in a temporary folder beside the final one, under a lock; the last step is a rename.
Whatever stops the process (Ctrl-C, SIGKILL, a power cut) leaves the temporary folder, which the
next run removes.
"""

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import filelock

from quasar_lab.errors import UserError
from quasar_lab.progress import say

CACHE_VARIABLE = "QUASAR_LAB_CACHE"
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def cache_directory(cache_dir: object = None) -> Path:
    """The folder that keeps fetched models; it need not exist yet.

    In this order: the argument, $QUASAR_LAB_CACHE, $XDG_CACHE_HOME/quasar-lab,
    ~/.cache/quasar-lab.
    """
    if cache_dir is not None:
        if not isinstance(cache_dir, (str, os.PathLike)) or not os.fspath(cache_dir):
            raise UserError(f"cache_dir={cache_dir!r} is no folder: pass a path, or None")
        return Path(cache_dir).expanduser().absolute()
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen).expanduser().absolute()
    # The XDG specification asks to ignore a relative path here.
    shared = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(shared):
        return Path(shared) / "quasar-lab"
    try:
        return Path.home() / ".cache" / "quasar-lab"
    except RuntimeError as error:
        raise UserError(
            f"there is no home folder to keep models in ({error}): set {CACHE_VARIABLE} to a folder"
        ) from error


@contextlib.contextmanager
def exclusive(cache: Path, name: str) -> Iterator[None]:
    """Hold the lock for `name` in the cache; wait, and say so, while another process has it."""
    cache.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(str(cache / f".{name}.lock"))
    try:
        lock.acquire(timeout=1)
    except filelock.Timeout:
        say(f"another process is preparing {name}: waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def workspace(cache: Path, name: str) -> Iterator[Path]:
    """An empty temporary folder inside the cache, gone afterwards. Needs the lock for `name`."""
    # Only the holder of the lock makes these, so all that are here belong to a process that died.
    for leftover in cache.glob(f".{name}.tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    folder = cache / f".{name}.tmp-{secrets.token_hex(4)}"
    # not tempfile.mkdtemp: its mode 0700 would shut other users out of a shared cache
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def require_space(cache: Path, needed: int, what: str) -> None:
    """Raise UserError unless `needed` bytes are free in the cache."""
    free = shutil.disk_usage(cache).free
    if free < needed:
        raise UserError(
            f"{what} needs {needed / 1e9:.2g} GB in {cache}, {free / 1e9:.2g} GB are free: "
            f"make room or set {CACHE_VARIABLE} to another folder"
        )


@contextlib.contextmanager
def clear_disk_errors(cache: Path) -> Iterator[None]:
    """Turn a full or unwritable disk, whichever library met it, into one UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        # safetensors reports a full disk as an error of its own, with this text only
        full = "No space left" in str(error) or "StorageFull" in str(error)
        number = getattr(error, "errno", None)
        if full or number in _DISK_FULL:
            raise UserError(
                f"the disk of {cache} is full: make room or set {CACHE_VARIABLE} to another folder"
            ) from error
        if isinstance(error, OSError) and number is not None:
            raise UserError(
                f"cannot write to the model cache {cache} ({error.strerror}): make it writable or "
                f"set {CACHE_VARIABLE} to another folder"
            ) from error
        raise


def sha256_of(path: Path) -> str:
    """The file's sha256 in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
