"""Several ranks work on each matrix together: what a layer makes first is cut by columns, then by rows.

    y = down(act(up(x)))       up, gate, q, k, v: a rank has some of the output features (some of the heads)
                               down, o: it has the matching input features, and the ranks' results are summed

so that one sum per sub-layer is all that ranks exchange (Shoeybi et al. 2019, arXiv:1909.08053). Norms and
the like are whole on every rank. Embedding and head are cut along the vocabulary:

    logits = head(x)       in training each rank keeps its own, (B, T, V / ranks), and the loss is made of
                           these (objectives.py); else they are gathered, for who measures, samples, predicts
"""

from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from clearhead.model.attention import Attention, project_apart
from clearhead.model.config import ModelConfig
from clearhead.model.transformer import Transformer


class Cut(NamedTuple):
    """How ranks share a module's input, its weight and bias, and its output."""

    x: Placement
    weight: Placement
    bias: Placement
    y: Placement
    logits: bool = False  # y leaves as a DTensor in training, and whole otherwise


WHOLE = Cut(Replicate(), Replicate(), Replicate(), Replicate())
COLUMNS = Cut(Replicate(), Shard(0), Shard(0), Shard(-1))
ROWS = Cut(Shard(-1), Shard(1), Replicate(), Replicate())
VOCABULARY = Cut(Replicate(), Shard(0), Shard(0), Replicate())
LOGITS = COLUMNS._replace(logits=True)
HEADS = Cut(Shard(1), Replicate(), Replicate(), Shard(1))  # a norm of each head: (B, H, T, K)

PLAN: dict[str, Cut] = {
    "*.attn.[qkv]": COLUMNS,
    "*.attn.o": ROWS,
    "*.attn.[qk]_norm": HEADS,
    "*.ff.gate": COLUMNS,
    "*.ff.up": COLUMNS,
    "*.ff.down": ROWS,
    "embed": VOCABULARY,
    "head": LOGITS,
    "*": WHOLE,
}


def plan_for(config: ModelConfig, n_ranks: int) -> dict[str, Cut]:
    """The first pattern that a module's path matches says how it is cut.

    ValueError: a config that is not cut this way, or whose sizes do not come out even.
    """
    unfit = {
        "shape": config.shape == "encoder-decoder",
        "latent": config.latent is not None,
        "experts": config.experts is not None,
        "attn_sinks": config.attn_sinks,
        "qk_norm": config.qk_norm == "flat",
        "positions": config.positions == "relative",
        "embed_dropout, attn_dropout, residual_dropout, ff_dropout": any(
            (config.embed_dropout, config.attn_dropout, config.residual_dropout, config.ff_dropout)
        ),
    }
    if named := [name for name, is_so in unfit.items() if is_so]:
        raise ValueError(
            f"train.tensor_parallel={n_ranks} does not go with model.{', model.'.join(named)} of this model; "
            "use train.parallel=fsdp alone"
        )
    sizes = {"n_heads": config.n_heads, "n_kv_heads": config.kv_heads, "d_ff": config.ff_width}
    for name, size in sizes.items():
        if size % n_ranks:
            raise ValueError(f"train.tensor_parallel={n_ranks} does not divide model.{name}={size}")
    if -(-config.vocab_size // n_ranks) * (n_ranks - 1) >= config.vocab_size:
        raise ValueError(
            f"train.tensor_parallel={n_ranks} leaves a rank no token of model.vocab_size="
            f"{config.vocab_size}; take fewer ranks"
        )
    head = PLAN["head"] if config.head in ("lm", "masked") else WHOLE
    return {**PLAN, "head": head}


def split_matrices(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cut the model's weights for the ranks of `mesh`; every parameter becomes a DTensor, if a whole one."""
    if not isinstance(model, Transformer):
        raise ValueError(f"tensor parallelism knows how to cut a Transformer, not a {type(model).__name__}")
    config = model.config
    plan = plan_for(config, mesh.size())
    tied = "weight" in model.head._parameters and model.head.weight is model.embed.weight
    for path, module in list(model.named_modules()):
        if isinstance(module, Attention):
            module.project = project_apart  # the fused product reads the weights past their modules
        inside_head = path.startswith("head.") and plan["head"] is not WHOLE
        if not module._parameters or inside_head:
            continue
        cut = next(cut for pattern, cut in plan.items() if fnmatchcase(path, pattern))
        _cut(module, mesh, cut)
        for child in (c for c in module.modules() if path == "head" and c is not module):
            _share(child, mesh, WHOLE)
    if tied:
        model.head.weight = model.embed.weight


def _cut(module: nn.Module, mesh: DeviceMesh, cut: Cut) -> None:
    """Cut one module, and let it take and give what the ranks hold as plain tensors."""
    _share(module, mesh, cut)

    def enter(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return DTensor.from_local(inputs[0], mesh, [cut.x], run_check=False), *inputs[1:]

    def leave(module: nn.Module, inputs: tuple[Any, ...], output: DTensor) -> Tensor:
        return output.redistribute(placements=[cut.y]).to_local()

    def leave_logits(module: nn.Module, inputs: tuple[Any, ...], output: DTensor) -> Tensor:
        return output.redistribute(placements=[cut.y]) if module.training else output.full_tensor()

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave_logits if cut.logits else leave)


def _share(module: nn.Module, mesh: DeviceMesh, cut: Cut) -> None:
    for name, p in list(module.named_parameters(recurse=False)):
        placement = {"weight": cut.weight, "bias": cut.bias}.get(name, Replicate())
        shared = distribute_tensor(p.detach(), mesh, [placement], src_data_rank=None)
        with torch.no_grad():
            module.register_parameter(name, nn.Parameter(shared, requires_grad=p.requires_grad))
