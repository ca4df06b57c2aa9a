"""The command that serves a checkpoint with vLLM, speculating as our drafters do.

vLLM verifies drafts with the model that it serves: on a W8A8 checkpoint that is Quasar. What its
options cannot express is said in `ServeCommand.notes`, not passed over.
"""

import json
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quasar_lab.checkpoints.compressed_tensors import read_layout
from quasar_lab.checkpoints.folder import check_config, check_files
from quasar_lab.drafting import LayerSkipDrafter, ModelDrafter, NGramDrafter, SuffixDrafter
from quasar_lab.errors import UserError

DEVICES = ("cpu", "cuda")
BACKENDS = ("mp", "ray")


@dataclass(frozen=True, slots=True)
class ServeCommand:
    """What to type on each node (one line a node; of several nodes the first is the head).

    environment: variables that every process needs; nodes: the arguments on each node;
    before: commands to run first, one a node; notes: what differs from the lab.
    """

    environment: dict[str, str]
    nodes: tuple[tuple[str, ...], ...]
    before: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def arguments(self) -> list[str]:
        """The head's arguments, for `subprocess`."""
        return list(self.nodes[0])

    def __str__(self) -> str:
        """Shell text: comments say on which node each line belongs, and what differs."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        several = len(self.nodes) > 1 or len(self.before) > 1
        lines = [f"# note: {note}" for note in self.notes]
        for commands in (self.before, [shlex.join(node) for node in self.nodes]):
            for number, command in enumerate(commands):
                if several:
                    lines.append(f"# on node {number}" + " (the head)" * (number == 0))
                lines.append(" ".join([*variables, command]))
        return "\n".join(lines)


def vllm_command(
    directory: str | Path,
    drafter: object = None,
    *,
    device: str = "cuda",
    num_gpus: int = 1,
    num_nodes: int = 1,
    backend: str = "mp",
    head_address: str = "HEAD",
    port: int = 8000,
    max_model_len: int | None = None,
) -> ServeCommand:
    """The command that serves the checkpoint in `directory` on 127.0.0.1.

    directory: a checkpoint of `export_compressed_tensors`, or one in full precision.
    drafter: an `NGramDrafter`, `SuffixDrafter` or `ModelDrafter`; None decodes plainly.
    device: "cuda" or "cpu" (vLLM's CPU build). num_gpus: of each node; num_nodes: the model is
        split over all GPUs of a node (tensor parallel) and by layers over the nodes (pipeline).
    backend: what connects several nodes, "mp" (vLLM's own processes) or "ray"; head_address: the
        first node's, as the others reach it.
    max_model_len: tokens of context to reserve memory for; None: the model's own.

    Raises UserError for a folder that vLLM could not load, numbers of GPUs or nodes that it could
    not split the model over, a context beyond the model's, and drafters without a counterpart.
    """
    folder = Path(os.path.expanduser(directory))
    config = _checked(folder, str(directory))
    _check_settings(config, device, num_gpus, num_nodes, backend, head_address, port, max_model_len)
    quantized = "quantization_config" in config
    speculation, notes = _speculation(drafter)
    if device == "cuda" and quantized:
        notes.append(
            "vLLM multiplies INT8 on GPUs of compute capability 7.5 to 9.x (Turing to Hopper), "
            "not on Blackwell"
        )
    command = ["vllm", "serve", str(folder)]
    options = ["--host", "127.0.0.1", "--port", str(port)]
    environment = {}
    if device == "cpu":
        # that build's own `vllm serve` looks for a GPU platform and fails
        command = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
        environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
        options += ["--dtype", "float32", "--enforce-eager"]
        notes.append("VLLM_CPU_KVCACHE_SPACE is in GB: raise it for many or long requests")
    else:
        options += ["--dtype", "bfloat16"]
    if max_model_len is not None:
        options += ["--max-model-len", str(max_model_len)]
    if num_gpus > 1:
        options += ["--tensor-parallel-size", str(num_gpus)]
    if speculation is not None:
        options += ["--speculative-config", json.dumps(speculation)]
    head = [*command, *options]
    if num_nodes == 1:
        return ServeCommand(environment, (tuple(head),), notes=tuple(notes))
    head += ["--pipeline-parallel-size", str(num_nodes)]
    notes += [
        "the checkpoint must lie at the same path on every node",
        "the lab has tried one process on a CPU; for more these are the options of vLLM 0.32",
    ]
    return _on_several_nodes(head, environment, notes, num_nodes, backend, head_address)


def _on_several_nodes(
    head: list[str],
    environment: dict[str, str],
    notes: list[str],
    num_nodes: int,
    backend: str,
    address: str,
) -> ServeCommand:
    if backend == "ray":
        joined = f"ray start --address={address}:6379"
        before = ("ray start --head --port=6379", *[joined] * (num_nodes - 1))
        on_head = (*head, "--distributed-executor-backend", "ray")
        return ServeCommand(environment, (on_head,), before, tuple(notes))
    common = ["--nnodes", str(num_nodes), "--master-addr", address, "--node-rank"]
    ranks = [[*head, *common, str(rank)] for rank in range(num_nodes)]
    nodes = tuple(tuple([*rank, "--headless"] if i else rank) for i, rank in enumerate(ranks))
    return ServeCommand(environment, nodes, notes=tuple(notes))


def _checked(folder: Path, label: str) -> dict[str, Any]:
    if not os.path.isdir(folder):
        raise UserError(f"there is no folder {label!r}: write one with `quasar-lab export FOLDER`")
    config = check_config(folder, label, trust_remote_code=False, quantized=True)
    if config.get("quantization_config"):
        read_layout(config, label)
    check_files(folder, label)
    return config


def _check_settings(
    config: dict[str, Any],
    device: str,
    num_gpus: int,
    num_nodes: int,
    backend: str,
    head_address: str,
    port: int,
    max_model_len: int | None,
) -> None:
    if device not in DEVICES:
        raise UserError(f"device is {device!r}: choose from {', '.join(DEVICES)}")
    if backend not in BACKENDS:
        raise UserError(f"backend is {backend!r}: choose from {', '.join(BACKENDS)}")
    if not re.fullmatch(r"[\w.:-]+", head_address):
        raise UserError(f"head_address is {head_address!r}: give the name or address of a machine")
    if not 0 < port < 65536:
        raise UserError(f"port is {port}: choose one from 1 to 65535")
    if num_gpus < 1 or num_nodes < 1:
        raise UserError(
            f"num_gpus is {num_gpus} and num_nodes {num_nodes}: both must be at least 1"
        )
    if device == "cpu" and (num_gpus, num_nodes) != (1, 1):
        raise UserError('several GPUs or nodes are for device="cuda"')
    layers = _number(config, "num_hidden_layers")
    if layers and num_nodes > layers:
        raise UserError(f"{num_nodes} nodes cannot share {layers} layers: choose at most {layers}")
    longest = _number(config, "max_position_embeddings")
    if max_model_len is not None and max_model_len < 1:
        raise UserError(f"max_model_len is {max_model_len}: choose at least 1 token")
    if max_model_len and longest and max_model_len > longest and not _is_stretched(config):
        raise UserError(f"max_model_len is {max_model_len}: the model takes {longest} at most")
    _check_split(config, num_gpus)


def _check_split(config: dict[str, Any], num_gpus: int) -> None:
    """vLLM gives each GPU as many heads, key-value heads (or a copy of one) and MLP rows."""
    heads = _number(config, "num_attention_heads")
    cached = _number(config, "num_key_value_heads") or heads
    inner = _number(config, "intermediate_size")

    def fits(number: int) -> bool:
        shared = cached % number == 0 or number % cached == 0
        return heads % number == 0 and shared and inner % number == 0

    if heads and not fits(num_gpus):
        fitting = ", ".join(str(number) for number in range(1, heads + 1) if fits(number))
        parts = f"{heads} attention heads ({cached} of keys and values)"
        if inner:
            parts += f" and an MLP of {inner}"
        raise UserError(f"{num_gpus} GPUs cannot share {parts} evenly: choose from {fitting}")


def _number(config: dict[str, Any], name: str) -> int:
    """An entry of config.json; 0 where it has none."""
    value = config.get(name)
    return value if isinstance(value, int) and value > 0 else 0


def _is_stretched(config: dict[str, Any]) -> bool:
    """Whether a rotary scaling makes the context longer than config.json's positions."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return scaling.get("rope_type", scaling.get("type", "default")) != "default"


def _speculation(drafter: object) -> tuple[dict[str, Any] | None, list[str]]:
    """(vLLM's speculative configuration or None, what it does differently)."""
    if drafter is None:
        return None, []
    if isinstance(drafter, NGramDrafter):
        settings: dict[str, Any] = {
            "method": "ngram",
            "num_speculative_tokens": drafter.num_draft_tokens,
            "prompt_lookup_min": drafter.min_ngram,
            "prompt_lookup_max": drafter.max_ngram,
        }
        first = 'vLLM continues the earliest occurrence, this drafter the latest: match="first"'
        return settings, [f"{first} is its rule"] * (drafter.match == "latest")
    if isinstance(drafter, SuffixDrafter):
        settings = {
            "method": "suffix",
            "num_speculative_tokens": drafter.num_draft_tokens,
            "suffix_decoding_max_spec_factor": drafter.length_factor,
            "suffix_decoding_max_cached_requests": 0,
        }
        notes = [
            "suffix decoding needs the package arctic-inference beside vLLM",
            "vLLM drafts only continuations seen in at least a tenth of the cases, ours the latest",
        ]
        if drafter.min_match > 1:
            notes.append(f"min_match = {drafter.min_match} has no counterpart")
        return settings, notes
    # LayerSkipDrafter is a ModelDrafter too, but has no checkpoint of its own
    if isinstance(drafter, ModelDrafter) and not isinstance(drafter, LayerSkipDrafter):
        model: Any = getattr(drafter.target, "model", None)
        path = getattr(getattr(model, "config", None), "_name_or_path", "")
        if not path:
            raise UserError("the drafting model does not say where its checkpoint is")
        settings = {
            "method": "draft_model",
            "model": path,
            "num_speculative_tokens": drafter.num_draft_tokens,
        }
        inner = ["the drafting model's own drafter has no counterpart"] * bool(drafter.drafter)
        return settings, inner
    raise UserError(
        f"a {type(drafter).__name__} has no counterpart in vLLM: use an NGramDrafter, a "
        "SuffixDrafter or a ModelDrafter"
    )
