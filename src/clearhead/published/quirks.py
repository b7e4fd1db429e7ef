"""Parts of config.json that one key alone does not tell: rotary positions, windows.

Files spell them in two ways. Newer ones have `rope_parameters`, with the type, the base and the scaling in
one dictionary, or one dictionary per type of layer; older ones have `rope_theta` and `rope_scaling` (with
`type` for the type) beside each other. Both are read, the newer is written.
"""

import math
from collections.abc import Callable

from clearhead.model.config import ModelConfig
from clearhead.model.config_parts import SCALING_FIELDS, RotaryScaling
from clearhead.published.mapping import Json, Part, as_fields

ACTIVATIONS = {  # config.json's names -> ours
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu_squared",
}

# Our fields of a scaling -> keys, and those which a file of each type must have.
_SCALING_KEYS = {
    "factor": "factor",
    "original_max_len": "original_max_position_embeddings",
    "attention_factor": "attention_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all": "mscale_all_dim",
    "truncate": "truncate",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "short_factors": "short_factor",
    "long_factors": "long_factor",
}
_REQUIRED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (),
    "longrope": ("short_factors", "long_factors"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


def rope_part(theta: float = 10_000.0) -> Part:
    """Rotary positions that are the same in all layers that have them; `theta`: the base if none is named."""

    def read(settings: Json) -> Json:
        spelled = dictionary(settings, "rope_scaling") or dictionary(settings, "rope_parameters")
        scaling = read_scaling(spelled, settings)
        share = spelled.get("partial_rotary_factor", settings.get("partial_rotary_factor"))
        if scaling is not None and share not in (None, 1):  # without a scaling it means nothing to them
            raise ValueError(
                f"partial_rotary_factor={share!r:.80} with rope_type={scaling.kind!r} is unknown"
            )
        base = spelled.get("rope_theta") or settings.get("rope_theta") or theta
        return {"rotary_theta": base, "rotary_scaling": scaling}

    def write(config: ModelConfig) -> Json:
        return {"rope_parameters": write_scaling(config.rotary_theta, config.rotary_scaling)}

    return Part(("rope_parameters", "rope_scaling", "rope_theta"), read, write)


def partial_rope_part(theta: float = 10_000.0, original: int = 4096) -> Part:
    """Rotary positions on a share of each head's features, unscaled or with longrope.

    The length in training, `original` if not named, stands outside of the dictionary.
    """
    length = "original_max_position_embeddings"

    def read(settings: Json) -> Json:
        spelled = dict(dictionary(settings, "rope_scaling") or dictionary(settings, "rope_parameters"))
        kind = spelled.get("rope_type") or spelled.get("type")
        if kind in ("su", "yarn"):  # earlier names
            spelled["rope_type"] = "longrope"
        spelled[length] = settings.get(length) or original
        share = spelled.get("partial_rotary_factor", settings.get("partial_rotary_factor"))
        d_head = settings.get("head_dim") or settings["hidden_size"] // settings["num_attention_heads"]
        width = d_head if share is None else int(d_head * share)
        return {
            "rotary_theta": spelled.get("rope_theta") or settings.get("rope_theta") or theta,
            "rotary_scaling": read_scaling(spelled, settings),
            "rotary_dim": None if width == d_head else width,
        }

    def write(config: ModelConfig) -> Json:
        made = write_scaling(config.rotary_theta, config.rotary_scaling)
        if config.rotary_dim is not None:
            share = config.rotary_dim / config.head_width
            exact = int(config.head_width * share) == config.rotary_dim
            made["partial_rotary_factor"] = share if exact else math.nextafter(share, 1)
        scaling = config.rotary_scaling
        known = None if scaling is None else scaling.original_max_len
        return {"rope_parameters": made, length: known or original}

    names = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", length)
    return Part(names, read, write)


def layered_rope_part(
    theta: float, window_theta: float, older: str = "rope_theta", older_full: str = "rope_theta"
) -> Part:
    """Rotary positions of their own for layers with a window, unscaled, and for those without.

    `older`: the key that older files have for the base in layers with a window; `older_full`: in the others.
    """
    kinds = ("full_attention", "sliding_attention")

    def read(settings: Json) -> Json:
        spelled = dictionary(settings, "rope_parameters")
        if spelled and not any(kind in spelled for kind in kinds):
            raise ValueError(f"rope_parameters has neither {' nor '.join(kinds)}")
        full = dictionary(spelled, kinds[0]) | dictionary(settings, "rope_scaling")
        narrow = dictionary(spelled, kinds[1])
        outer = {name: spelled[name] for name in ("truncate",) if name in spelled}
        base = full.get("rope_theta") or settings.get(older_full) or theta
        window_base = narrow.get("rope_theta") or settings.get(older) or window_theta
        scaling = read_scaling({**full, "truncate": None, **outer}, settings)
        window_scaling = read_scaling({**narrow, "truncate": None, **outer}, settings)
        if window_scaling is None:
            same = scaling is None and base == window_base
            return {
                "rotary_theta": base,
                "rotary_scaling": scaling,
                "window_rotary_theta": None if same else window_base,
            }
        if (window_scaling, window_base) != (scaling, base):
            raise ValueError(f"rope_parameters: {kinds[1]} may only be scaled exactly as {kinds[0]}")
        return {"rotary_theta": base, "rotary_scaling": scaling, "window_rotary_theta": None}

    def write(config: ModelConfig) -> Json:
        full = write_scaling(config.rotary_theta, config.rotary_scaling)
        narrow = dict(full)
        if config.window_rotary_theta is not None:
            narrow = write_scaling(config.window_rotary_theta, None)
        outer = {"truncate": full.pop("truncate")} if "truncate" in full else {}
        narrow.pop("truncate", None)
        return {"rope_parameters": {kinds[0]: full, kinds[1]: narrow} | outer}

    return Part(("rope_parameters", "rope_scaling", older_full, older), read, write)


def dictionary(settings: Json, name: str) -> Json:
    """The dictionary under this key, or an empty one."""
    value = settings.get(name) or {}
    if not isinstance(value, dict):
        raise ValueError(f"{name}={value!r:.80} is no dictionary")
    return value


def read_scaling(spelled: Json, settings: Json) -> RotaryScaling | None:
    """The scaling that a dictionary of rotary parameters describes."""
    kind = spelled.get("rope_type") or spelled.get("type") or "default"
    if kind == "default":
        return None
    if not isinstance(kind, str) or kind not in SCALING_FIELDS:
        raise ValueError(f"rope_type={kind!r:.80} is unknown; known: default, {', '.join(SCALING_FIELDS)}")
    found = {field: spelled.get(_SCALING_KEYS[field]) for field in SCALING_FIELDS[kind]}
    missing = [_SCALING_KEYS[field] for field in _REQUIRED[kind] if found[field] is None]
    if missing:
        raise ValueError(f"rope_type={kind!r} needs {', '.join(missing)}")
    original = "original_max_len"
    if original in found and found[original] is None:
        found[original] = settings.get("max_position_embeddings")
    if kind == "yarn" and found["factor"] is None:
        found["factor"] = settings["max_position_embeddings"] / found[original]
    given: Json = {"kind": kind} | {field: value for field, value in found.items() if value is not None}
    return RotaryScaling(**as_fields(RotaryScaling, given))


def write_scaling(theta: float, scaling: RotaryScaling | None) -> Json:
    """The dictionary of rotary parameters with this base and scaling."""
    if scaling is None:
        return {"rope_type": "default", "rope_theta": theta}
    made: Json = {"rope_type": scaling.kind, "rope_theta": theta}
    for field in SCALING_FIELDS[scaling.kind]:
        value = getattr(scaling, field)
        if value != RotaryScaling.__dataclass_fields__[field].default or field in _REQUIRED[scaling.kind]:
            made[_SCALING_KEYS[field]] = list(value) if isinstance(value, tuple) else value
    return made


def window_part(
    derive: Callable[[Json, int], list[bool]] | None,
    default: int | None = None,
    switch: str | None = None,
    also: tuple[str, ...] = (),
) -> Part:
    """A window in some layers: `layer_types`, or without it what `derive(settings, n_layers)` says.

    `derive` None: the window is in all layers, and there is no `layer_types`. `default`: its size if the file
    names none. `switch`: a key that must be true for a window. `also`: the keys that `derive` looks at.
    """

    def read(settings: Json) -> Json:
        window = settings.get("sliding_window", default) or None  # 0: none
        if window is None or (switch is not None and not settings.get(switch)):
            return {"window": None, "windowed_layers": None}
        if derive is None:
            return {"window": window, "windowed_layers": None}
        return {"window": window} | windowed_layers(settings, derive)

    def write(config: ModelConfig) -> Json:
        made: Json = {"sliding_window": config.window}
        if switch is not None:
            made[switch] = config.window is not None
        if derive is not None:
            made["layer_types"] = [
                "sliding_attention" if config.has_window(layer) else "full_attention"
                for layer in range(config.n_layers)
            ]
        return made

    names = ("sliding_window", *(() if derive is None else ("layer_types",)), *also)
    return Part(names if switch is None else (*names, switch), read, write)


def windowed_layers(settings: Json, derive: Callable[[Json, int], list[bool]]) -> Json:
    """Which layers have the window; none at all is no window."""
    kinds = settings.get("layer_types")
    if kinds is None:
        chosen = derive(settings, settings["num_hidden_layers"])
    else:
        known = ("sliding_attention", "full_attention")
        if not isinstance(kinds, list) or any(kind not in known for kind in kinds):
            raise ValueError(f"layer_types={kinds!r:.80} must be a list of {' and '.join(known)}")
        chosen = [kind == "sliding_attention" for kind in kinds]
    if len(chosen) != settings["num_hidden_layers"]:
        layers = settings["num_hidden_layers"]
        raise ValueError(f"windowed_layers has {len(chosen)} entries (layer_types) for n_layers={layers}")
    if not any(chosen):
        return {"window": None, "windowed_layers": None}
    return {"windowed_layers": None if all(chosen) else tuple(chosen)}
