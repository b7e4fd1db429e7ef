"""How much memory tensors hold while something is computed, counted tensor by tensor.

Every tensor that an operation makes adds the bytes of its storage until the last one that shares it is gone.
What was there before is not counted, nor what an operation needs inside itself. Tensors without values count
like others: a pass can be measured that no machine at hand could hold.
"""

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Within `with LiveBytes() as live`: `live.now` bytes are held, `live.peak` were at most.

    >>> import torch
    >>> with LiveBytes() as live:
    ...     for _ in range(3):
    ...         rows = torch.zeros(1000)
    >>> live.now, live.peak  # the new rows are made before the old ones are let go
    (4000, 8000)
    """

    def __init__(self) -> None:
        super().__init__()
        self.now, self.peak = 0, 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            if isinstance(made, Tensor):
                self._count(made, before)
        return result

    def _count(self, made: Tensor, before: set[int]) -> None:
        storage = made.untyped_storage()
        if id(storage) in before or storage in self._known:
            return
        self._known.add(storage)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._let_go, storage.nbytes())

    def _let_go(self, n_bytes: int) -> None:
        self.now -= n_bytes
