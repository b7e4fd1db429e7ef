"""What goes over the wire: tensors as safetensors bytes, everything else as JSON that every reader accepts.

    8 bytes: length of the header (little-endian)   header: JSON   raw little-endian numbers

The bytes of an answer are those of a file: `safetensors.torch.load` reads them as they are.
"""

import json
import math
from typing import Any

from jaxtyping import Shaped
from safetensors.torch import save
from torch import Tensor

Mapping = dict[str, Any]


def to_bytes(tensors: dict[str, Shaped[Tensor, "..."]], metadata: Mapping) -> bytes:
    """Tensors by name, and metadata: texts as they are, anything else as JSON."""
    texts = {key: value if isinstance(value, str) else to_json(value) for key, value in metadata.items()}
    return save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, texts)


def to_json(value: object) -> str:
    """JSON; numbers that it does not have become the texts "nan", "inf" and "-inf"."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), separators=(",", ":"), allow_nan=False)


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return value


def for_html(value: object) -> str:
    """JSON that can stand inside a <script> element of any page."""
    return to_json(value).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
