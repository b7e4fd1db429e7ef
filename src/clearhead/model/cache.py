"""The keys and values so far, so that a new token costs one position instead of the whole sequence.

All shapes are static: room for `capacity` positions is taken at once and `length` counts, as a tensor, how
many are filled. So a compiled decoding step is one graph for every length, and nothing waits for the device.
Attention gets one `LayerCache` and calls `append`; it never learns which kind it got and never advances
anything.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class LayerCache:
    """Keys and values of one layer, each (B, G, S, K) with S = capacity; `slots` says where the next ones
    go.
    """

    def __init__(self, keys: Float[Tensor, "B G S K"], values: Float[Tensor, "B G S K_v"]) -> None:
        self.keys, self.values = keys, values
        self.slots: Tensor | None = None

    def append(
        self, keys: Float[Tensor, "B G T K"], values: Float[Tensor, "B G T K_v"]
    ) -> tuple[Float[Tensor, "B G S K"], Float[Tensor, "B G S K_v"]]:
        """Write T new keys and values into their slots; return all S. Slots not yet filled hold zeros."""
        assert self.slots is not None, "Cache.open() comes before append()"
        self.keys.index_copy_(2, self.slots, keys.to(self.keys.dtype))  # autocast makes them narrower
        self.values.index_copy_(2, self.slots, values.to(self.values.dtype))
        return self.keys, self.values


class Cache:
    """The state of a batch of running sequences: every layer's keys and values, and which positions are real.

    `length`: positions filled so far, padding included. `real` (B, S): False for padding. `seen` (B): real
    tokens of each sequence so far, which is the position of its next one.
    """

    def __init__(
        self,
        n_layers: int,
        batch_size: int,
        n_kv_heads: int,
        capacity: int,
        d_head: int | tuple[int, int],
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        widths = (d_head, d_head) if isinstance(d_head, int) else d_head  # of a key, of a value

        def empty(width: int) -> Tensor:
            return torch.zeros(batch_size, n_kv_heads, capacity, width, device=device, dtype=dtype)

        self.layers = [LayerCache(empty(widths[0]), empty(widths[1])) for _ in range(n_layers)]
        self.capacity = capacity
        self.length = torch.zeros((), dtype=torch.long, device=device)
        self.real = torch.zeros(batch_size, capacity, dtype=torch.bool, device=device)
        self.seen = torch.zeros(batch_size, dtype=torch.long, device=device)

    def open(self, real: Bool[Tensor, "B T"]) -> tuple[Int[Tensor, " T"], Int[Tensor, "B T"]]:
        """Make room for T tokens of which `real` are no padding; return their slots and their positions."""
        n_new = real.shape[1]
        slots = self.length + torch.arange(n_new, device=real.device)
        try:
            self.real.index_copy_(1, slots, real)
        except IndexError:  # looking at the length beforehand would wait for the device
            raise ValueError(
                f"the cache has room for {self.capacity} positions; {int(self.length)} are filled and "
                f"{n_new} more were given"
            ) from None
        positions = (self.seen[:, None] + real.cumsum(1) - 1).clamp(min=0)
        for layer in self.layers:
            layer.slots = slots
        return slots, positions

    def advance(self, real: Bool[Tensor, "B T"]) -> None:
        """Count the T tokens just computed. The Transformer calls it once, at the end of a pass."""
        self.length += real.shape[1]
        self.seen += real.sum(1)

    def keep_rows(self, rows: Int[Tensor, " N"]) -> None:
        """Keep these sequences, in this order; a row may be taken more than once."""
        for layer in self.layers:
            layer.keys, layer.values = layer.keys[rows], layer.values[rows]
        self.real, self.seen = self.real[rows], self.seen[rows]
