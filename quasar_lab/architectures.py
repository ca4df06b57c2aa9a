"""Which modules of a model read which: the groups that smoothing may rescale together.

Dividing a tensor's channels by s and multiplying the weights of *all* its readers by s leaves a
model's function unchanged. A `SmoothingGroup` names one producer and all its readers; an
`Architecture` lists them for one decoder layer by name, and `find_groups` lays it over a model.

To teach the lab a new family, describe one decoder layer and register it:

    register_architecture(Architecture(
        "mine",
        norms={"ln_attn": [("attn.qkv",)], "ln_mlp": [("mlp.fc_in",)]},
        unsmoothed=("attn.out", "mlp.fc_out"),
    ))

`group_check.wrong_groups` proves on the model itself that a list of groups is right.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from quasar_lab.errors import UserError
from quasar_lab.structure import decoder_layers, norm_weight, weight_matrix, weight_modules

GROUP_KINDS = ("norms", "v_o", "up_down")


@dataclass(frozen=True, slots=True)
class SmoothingGroup:
    """One producer and all its readers, by module name.

    kind: "norms", "v_o" or "up_down"; source: the module whose output is divided by s (a norm, or
    a linear whose last `width` outputs are); readers: the modules whose input columns are
    multiplied by s; repeats, head_dim: with grouped-query attention each KV head of `head_dim`
    channels appears `repeats` times in a row at the reader, and shares one scale.
    """

    kind: str
    source: str
    readers: tuple[str, ...]
    width: int
    repeats: int = 1
    head_dim: int = 1

    def pool(self, per_reader_channel: Float[Tensor, "C"]) -> Float[Tensor, "width"]:
        """Largest value over the reader channels that share a source channel."""
        return per_reader_channel.view(-1, self.repeats, self.head_dim).amax(1).flatten()

    def expand(self, per_source_channel: Float[Tensor, "width"]) -> Float[Tensor, "C"]:
        """One value for each source channel, laid out as the reader sees them."""
        heads = per_source_channel.view(-1, 1, self.head_dim)
        return heads.expand(-1, self.repeats, -1).flatten()


@dataclass(frozen=True, slots=True)
class Architecture:
    """The groups of one decoder layer, by module names relative to the layer.

    norms: norm -> alternatives of its readers (the first whose names all exist is taken: dense or
        mixture-of-experts layers); value_output: alternatives of (value projection, output
        projection); up_down: alternatives of (up, down), only where the up projection reaches the
        down projection by a product or a ReLU; unsmoothed: linears that no group can cover.
    model_types: the `config.model_type`s this is for. Empty: any model in whose layers all names
        are found.
    """

    name: str
    norms: Mapping[str, Sequence[tuple[str, ...]]]
    value_output: Sequence[tuple[str, str]] = ()
    up_down: Sequence[tuple[str, str]] = ()
    unsmoothed: tuple[str, ...] = ()
    model_types: tuple[str, ...] = field(default=())


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_EXPERTS = ("mlp.experts", "mlp.gate")  # the router reads the norm as well
_READERS_OF_MLP_NORM = [
    ("mlp.gate_proj", "mlp.up_proj"),
    (
        *_EXPERTS,
        "mlp.shared_expert.gate_proj",
        "mlp.shared_expert.up_proj",
        "mlp.shared_expert_gate",
    ),
    (*_EXPERTS, "mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    _EXPERTS,
]
_UP_DOWN = [
    (f"{mlp}.up_proj", f"{mlp}.down_proj")
    for mlp in ("mlp", "mlp.shared_expert", "mlp.shared_experts")
]
_REGISTRY: list[Architecture] = [
    # Gemma 2 and 3: the norm before the MLP has a name of its own, post_attention_layernorm
    # feeds the residual stream.
    Architecture(
        "gemma2",
        norms={
            "input_layernorm": [_QKV],
            "pre_feedforward_layernorm": [("mlp.gate_proj", "mlp.up_proj")],
        },
        value_output=[("self_attn.v_proj", "self_attn.o_proj")],
        up_down=[("mlp.up_proj", "mlp.down_proj")],
    ),
    Architecture(
        "llama",  # Mistral, Qwen2, Qwen3, Gemma, openPangu and their mixtures of experts
        norms={"input_layernorm": [_QKV], "post_attention_layernorm": _READERS_OF_MLP_NORM},
        value_output=[("self_attn.v_proj", "self_attn.o_proj")],
        up_down=_UP_DOWN,
    ),
    Architecture(
        "phi3",
        norms={
            "input_layernorm": [("self_attn.qkv_proj",)],
            "post_attention_layernorm": [("mlp.gate_up_proj",)],
        },
        value_output=[("self_attn.qkv_proj", "self_attn.o_proj")],
        up_down=[("mlp.gate_up_proj", "mlp.down_proj")],
    ),
    Architecture(
        "opt",
        norms={"self_attn_layer_norm": [_QKV], "final_layer_norm": [("fc1",)]},
        value_output=[("self_attn.v_proj", "self_attn.out_proj")],
        up_down=[("fc1", "fc2")],  # ReLU(x / s) = ReLU(x) / s
    ),
    Architecture(
        "gpt2",
        norms={"ln_1": [("attn.c_attn",)], "ln_2": [("mlp.c_fc",)]},
        value_output=[("attn.c_attn", "attn.c_proj")],
        unsmoothed=("mlp.c_proj",),  # behind a GELU, which does not commute with a scale
    ),
]


def register_architecture(architecture: Architecture) -> None:
    """Make `architecture` known; the latest registered is tried first, a same name is replaced."""
    _REGISTRY[:] = [known for known in _REGISTRY if known.name != architecture.name]
    _REGISTRY.insert(0, architecture)


def registered_architectures() -> tuple[Architecture, ...]:
    """All known architectures, in the order in which they are tried."""
    return tuple(_REGISTRY)


def find_groups(model: nn.Module, kinds: Sequence[str] = GROUP_KINDS) -> list[SmoothingGroup]:
    """The smoothing groups of `model`, layer by layer, of the given kinds.

    Raises UserError when no registered architecture fits (naming the modules that none of them
    could place), or when one registered for this `model_type` names a module that is not there.
    """
    for kind in kinds:
        if kind not in GROUP_KINDS:
            raise UserError(f"unknown kind of group {kind!r}: choose from {', '.join(GROUP_KINDS)}")
    layers = decoder_layers(model)
    architecture = _match(model, layers)
    groups: list[SmoothingGroup] = []
    for prefix, layer in layers.items():
        modules = dict(layer.named_modules())
        for norm, alternatives in architecture.norms.items():
            if "norms" in kinds:
                readers = _first_present(alternatives, modules)
                assert readers is not None
                names = tuple(f"{prefix}.{reader}" for reader in readers)
                width = norm_weight(modules[norm]).numel()
                groups.append(SmoothingGroup("norms", f"{prefix}.{norm}", names, width))
        for kind, pairs in (("v_o", architecture.value_output), ("up_down", architecture.up_down)):
            pair = _first_present(pairs, modules)
            if kind in kinds and pair is not None:
                groups.append(_pair_group(kind, prefix, pair[0], pair[1], modules, model))
    return groups


def _pair_group(
    kind: str,
    prefix: str,
    source: str,
    reader: str,
    modules: dict[str, nn.Module],
    model: nn.Module,
) -> SmoothingGroup:
    """A group of two linears; in a fused projection the source is its last rows."""
    channels = weight_matrix(modules[reader]).shape[1]
    width, repeats, head_dim = channels, 1, 1
    if kind == "v_o":
        config: Any = model.config
        config = config.get_text_config()
        heads = config.num_attention_heads
        repeats = heads // (getattr(config, "num_key_value_heads", None) or heads)
        head_dim = channels // heads
        width = channels // repeats
    return SmoothingGroup(
        kind, f"{prefix}.{source}", (f"{prefix}.{reader}",), width, repeats, head_dim
    )


def _first_present(
    alternatives: Sequence[tuple[str, ...]], modules: Mapping[str, nn.Module]
) -> tuple[str, ...] | None:
    return next((names for names in alternatives if all(n in modules for n in names)), None)


def _match(model: nn.Module, layers: dict[str, nn.Module]) -> Architecture:
    """The first registered architecture that places every linear of every decoder layer."""
    model_type = getattr(getattr(model, "config", None), "model_type", "")
    nearest: tuple[int, str, list[str]] | None = None
    for architecture in _REGISTRY:
        if architecture.model_types and model_type not in architecture.model_types:
            continue
        missing, unplaced = _fit(architecture, layers)
        if not missing and not unplaced:
            return architecture
        if missing and architecture.model_types:
            raise UserError(
                f"architecture {architecture.name!r}: {missing[0]!r} matches no module of this "
                f"{model_type} model; correct the pattern and register it again"
            )
        if nearest is None or len(missing) + len(unplaced) < nearest[0]:
            problems = unplaced or [f"a reader for {name}, which is absent" for name in missing]
            nearest = (len(missing) + len(unplaced), architecture.name, problems)
    assert nearest is not None
    _, name, problems = nearest
    shown = ", ".join(problems[:4]) + (f" and {len(problems) - 4} more" if problems[4:] else "")
    raise UserError(
        f"unknown architecture {type(model).__name__}: the nearest, {name!r}, could not place "
        f"{shown}; describe its layers with quasar_lab.architectures.register_architecture, or "
        'use smoothing="none"'
    )


def _fit(architecture: Architecture, layers: dict[str, nn.Module]) -> tuple[list[str], list[str]]:
    """(names of the architecture that are missing, linears of the model that it does not place)."""
    missing: list[str] = []
    unplaced: list[str] = []
    for prefix, layer in layers.items():
        modules = dict(layer.named_modules())
        placed = set(architecture.unsmoothed)
        for norm, alternatives in architecture.norms.items():
            readers = _first_present(alternatives, modules)
            if norm not in modules or readers is None:
                absent = norm if norm not in modules else alternatives[0][0]
                missing.append(f"{prefix}.{absent}")
            else:
                placed.update(readers)
        for pairs in (architecture.value_output, architecture.up_down):
            placed.update(_first_present(pairs, modules) or ())
        unplaced += [
            f"{prefix}.{name}"
            for name in weight_modules(layer)
            if not any(name == known or name.startswith(f"{known}.") for known in placed)
        ]
    return missing, unplaced
