"""A published model so small that it is made in no time: a random BERT of any class, with its tokenizer."""

from pathlib import Path
from typing import Any

import torch

WORDS = "the cat sees a small green house and an old dog under tree in paris ann bob . , ?"
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 24,
    "initializer_range": 0.2,
}


def make_bert(transformers: Any, folder: Path, kind: str, **settings: Any) -> tuple[Any, Any]:
    """Write a model of the class `kind` and its tokenizer into a folder; return both."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS.split()]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    tokenizer = transformers.BertTokenizerFast(str(folder / "vocab.txt"))
    torch.manual_seed(1)
    config = transformers.BertConfig(vocab_size=len(tokenizer), **SIZES, **settings)
    model = getattr(transformers, kind)(config).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer
