"""A model repository of the Hugging Face Hub, as a local folder.

Only what a causal language model needs is fetched: config, tokenizer and safetensors of the top
folder. The config comes first, so that a model that cannot be used is refused before gigabytes of
it arrive. huggingface_hub keeps the files, resumes what was interrupted and respects
HF_HUB_OFFLINE, HF_HOME and HF_ENDPOINT.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from quasar_lab.checkpoints.cache import CACHE_VARIABLE, cache_directory
from quasar_lab.checkpoints.folder import check_config, one_line
from quasar_lab.errors import UserError
from quasar_lab.progress import say, someone_watches

_WANTED = ["*.json", "model*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
# folders such as original/ or onnx/ hold the same model in other forms
_UNWANTED = ["*/*"]


def fetch_repository(
    repo_id: str,
    *,
    cache_dir: object = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Path:
    """The folder with the repository's files, fetched now as far as they are not here yet.

    Without `cache_dir` they go where all Hugging Face libraries keep them. Raises UserError when
    the repository does not exist, is closed to the user, cannot be reached or is no causal
    language model.
    """
    from huggingface_hub import hf_hub_download, snapshot_download

    where = _cache(cache_dir)
    if not someone_watches() and cached_repository(repo_id, cache_dir=cache_dir) is None:
        say(f"fetching {repo_id} from the Hub")
    with _clear_hub_errors(repo_id, revision), _bars_for_watchers():
        config = hf_hub_download(repo_id, "config.json", cache_dir=where, revision=revision)
        check_config(Path(config).parent, repo_id, trust_remote_code=trust_remote_code)
        folder = snapshot_download(
            repo_id,
            cache_dir=where,
            revision=revision,
            allow_patterns=_WANTED + ["*.py"] * trust_remote_code,
            ignore_patterns=_UNWANTED,
        )
    return Path(folder)


def cached_repository(repo_id: str, *, cache_dir: object = None) -> Path | None:
    """The folder of a repository that is here already, or None; never uses the network."""
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            repo_id,
            cache_dir=_cache(cache_dir),
            local_files_only=True,
            allow_patterns=_WANTED,
            ignore_patterns=_UNWANTED,
        )
    except (OSError, ValueError):
        return None
    return Path(folder)


def _cache(cache_dir: object) -> str | None:
    return None if cache_dir is None else os.fspath(cache_directory(cache_dir) / "hub")


@contextlib.contextmanager
def _bars_for_watchers() -> Iterator[None]:
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if someone_watches() or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@contextlib.contextmanager
def _clear_hub_errors(repo_id: str, revision: str | None) -> Iterator[None]:
    from huggingface_hub import constants, errors

    try:
        yield
    except UserError:
        raise
    except errors.HFValidationError as error:
        raise UserError(f"{repo_id!r} is no Hub id (org/name): {one_line(error)}") from error
    except errors.GatedRepoError as error:
        raise UserError(
            f"{repo_id} asks you to accept its terms: do so on its page on the Hub, then log in "
            "with `hf auth login` and run again"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(
            f"there is no model {repo_id} on the Hub, or it is private: check the spelling, or "
            "log in with `hf auth login`"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UserError(f"{repo_id} has no revision {revision!r} on the Hub") from error
    except errors.RemoteEntryNotFoundError as error:
        raise UserError(
            f"{repo_id} on the Hub has no config.json, so it is no transformers model: "
            "look for its safetensors version"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        if constants.HF_HUB_OFFLINE:
            raise UserError(
                f"{repo_id} is not on this machine and HF_HUB_OFFLINE is set: unset it, or give a "
                "local folder"
            ) from error
        raise UserError(
            f"{repo_id} is not on this machine and the Hub cannot be reached "
            f"({one_line(error.__cause__ or error)}): check the network, or give a local folder"
        ) from error
    except errors.HfHubHTTPError as error:
        if error.response is None or error.response.status_code not in (401, 403):
            raise _interrupted(repo_id, error) from error
        raise UserError(
            f"the Hub refuses {repo_id} to you: log in with `hf auth login`, or renew your HF_TOKEN"
        ) from error
    except OSError as error:
        if error.errno is None:
            raise _interrupted(repo_id, error) from error
        raise UserError(
            f"cannot keep {repo_id} on disk ({error.strerror}): make room, or choose another "
            f"folder with cache_dir or HF_HOME (the default model: {CACHE_VARIABLE})"
        ) from error
    # httpx errors, whichever version of it huggingface_hub uses
    except Exception as error:
        raise _interrupted(repo_id, error) from error


def _interrupted(repo_id: str, error: Exception) -> UserError:
    return UserError(
        f"fetching {repo_id} from the Hub failed ({one_line(error)}): run again to go on where "
        "it stopped"
    )
