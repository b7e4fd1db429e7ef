"""clearhead: a Transformer you can see through.

The public names, in reading order. They resolve on first use (PEP 562), so that `import clearhead` costs
nothing and a worker that only needs a tokenizer never loads torch.
"""

from importlib import import_module

__version__ = "0.1.0"

_HOME = {
    # 1  text becomes numbers
    "train_bpe": "text.bpe",
    "Tokenizer": "text.tokenizer",
    "sample_batch": "text.batches",
    # 2  numbers become predictions
    "ModelConfig": "model.config",
    "ExpertsConfig": "model.config_parts",
    "LatentConfig": "model.config_parts",
    "RotaryScaling": "model.config_parts",
    "Linear": "model.layers",
    "Embedding": "model.layers",
    "LayerNorm": "model.layers",
    "RMSNorm": "model.layers",
    "BatchNorm": "model.layers",
    "softmax": "model.layers",
    "silu": "model.layers",
    "FeedForward": "model.layers",
    "Rotary": "model.position",
    "attend": "model.attention",
    "Attention": "model.attention",
    "Block": "model.block",
    "Transformer": "model.transformer",
    # 3  published models, exactly
    "load": "published.models",
    "save": "published.models",
    "embed": "published.similarity",
    "similarity": "published.similarity",
    "neighbours": "published.similarity",
    # 4  the model speaks
    "generate": "generation.decode",
    "stream": "generation.decode",
    "Conversation": "generation.conversation",
    # 5  the model learns
    "cross_entropy": "training.objectives",
    "clip_gradients": "training.optim",
    "AdamW": "training.optim",
    "cosine_schedule": "training.schedules",
    "save_checkpoint": "training.checkpoint",
    "load_checkpoint": "training.checkpoint",
    # 6  the model is seen
    "record": "inspector.record",
    # 7  the model serves
    "look": "server.look",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'clearhead' has no attribute {name!r}; it has {', '.join(_HOME)}")
    value = getattr(import_module(f"clearhead.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
