"""What lm-eval is told: sums of log-probabilities that equal our own evaluation, and greedy continuations."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from clearhead.generation.decode import generate
from clearhead.model.config import ModelConfig
from clearhead.model.transformer import Transformer
from clearhead.text.bpe import train_bpe
from clearhead.text.shards import Shards, ShardWriter, write_index
from clearhead.text.tokenizer import Tokenizer
from clearhead.training.evaluate import evaluate
from clearhead.training.harness import Scorer, for_lm_eval
from clearhead.training.loop import train
from tiny_run import tiny_recipe, write_corpus

END = "<|endoftext|>"
TEXT = "the old cat sees the green bird under the tree and the dog finds a small house ."


class Asked(NamedTuple):
    """A request as the harness makes it."""

    args: tuple[Any, ...]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    vocab, merges = train_bpe([TEXT * 3], 290, (END,))
    return Tokenizer(vocab, merges, (END,))


@pytest.fixture(scope="module")
def scorer(tokenizer: Tokenizer) -> Scorer:
    config = ModelConfig(vocab_size=tokenizer.vocab_size, max_len=16, d_model=32, n_layers=2, n_heads=2)
    return Scorer(Transformer(config, seed=0), tokenizer, batch_size=2, max_new_tokens=6)


@torch.no_grad()
def by_hand(scorer: Scorer, before: list[int], after: list[int]) -> tuple[float, bool]:
    """log p(after | before), one token at a time."""
    total, greedy, ids = 0.0, True, list(before)
    for token in after:
        logits = scorer.model(torch.tensor([ids[-16:]]))[0, -1]
        total += logits.log_softmax(-1)[token].item()
        greedy &= int(logits.argmax()) == token
        ids.append(token)
    return total, greedy


def test_a_continuation_has_the_sum_of_its_tokens(scorer: Scorer, tokenizer: Tokenizer) -> None:
    """Whatever stands beside it in the batch, with a blank at the border, and with no context at all."""
    likeliest = generate(scorer.model, tokenizer.encode("the cat"), max_new_tokens=1)
    cases = [("the cat", " sees a bird"), ("the cat ", "sees a bird"), ("", "the tree"), ("a", " dog")]
    cases.append(("the cat", tokenizer.decode(likeliest)))
    found = scorer.loglikelihood([Asked(case) for case in cases])
    for (context, continuation), (total, greedy) in zip(cases, found, strict=True):
        before = tokenizer.encode(context.rstrip()) if context else []
        after = tokenizer.encode(context + continuation)[len(before) :]
        expected = by_hand(scorer, before or [tokenizer.special_id(END)], after)
        assert (total, greedy) == (pytest.approx(expected[0], abs=1e-4), expected[1])
    assert found[0] == found[1]


def test_a_long_context_loses_its_beginning(scorer: Scorer, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    context, continuation = tokenizer.decode(ids[:-3]), tokenizer.decode(ids[-3:])
    assert len(ids) > 17
    found = scorer.loglikelihood([Asked((context, continuation))])[0][0]
    short = tokenizer.decode(ids[-17:-3])
    assert found == scorer.loglikelihood([Asked((short, continuation))])[0][0]


def test_a_text_costs_what_evaluate_says(scorer: Scorer, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Three windows of 16 tokens, the last one the end of the text: both cut them alike."""
    end = tokenizer.special_id(END)
    ids = next(
        ids
        for n in range(99)
        if len(ids := tokenizer.encode(f"{'a ' * n}{TEXT}")) % 16 == 15 and len(ids) > 40
    )
    writer = ShardWriter(tmp_path, "one", tokenizer.vocab_size, tokenizer.fingerprint)
    writer.add(np.array(ids, np.uint16), end, 1)
    entry = writer.finish()
    assert entry is not None
    write_index(tmp_path, [entry], tokenizer.vocab_size, tokenizer.fingerprint, end)
    result = evaluate(scorer.model, Shards(tmp_path))
    total = scorer.loglikelihood_rolling([Asked((tokenizer.decode(ids) + END,))])[0]
    assert -total == pytest.approx(result.loss * result.n_tokens, rel=1e-6)
    assert result.n_tokens == len(ids) + 1


def test_an_answer_ends_before_a_stop_string(scorer: Scorer, tokenizer: Tokenizer) -> None:
    free = scorer.generate_until([Asked(("the cat", {"until": [], "max_gen_toks": 8}))])[0]
    assert free == generate(
        scorer.model, "the cat", tokenizer=tokenizer, max_new_tokens=8, eos_id=tokenizer.special_id(END)
    )
    stop = free[len(free) // 2]
    cut = scorer.generate_until([Asked(("the cat", {"until": stop, "do_sample": False, "max_gen_toks": 8}))])
    assert cut == [free[: free.index(stop)]]
    long = Asked((TEXT, {"until": ["\n"], "temperature": 0.0}))
    assert scorer.generate_until([long]) == scorer.generate_until([long])
    with pytest.raises(ValueError, match=r"unknown options num_beams"):
        scorer.generate_until([Asked(("a", {"num_beams": 2}))])
    with pytest.raises(ValueError, match=r"max_gen_toks=16 leaves no room"):
        scorer.generate_until([Asked(("a", {"max_gen_toks": 16}))])


def test_only_decoders_can_be_asked(tokenizer: Tokenizer) -> None:
    model = Transformer(ModelConfig(vocab_size=290, shape="encoder", head="masked"))
    with pytest.raises(ValueError, match=r"this model is 'encoder' with the head 'masked'"):
        Scorer(model, tokenizer)
    without = Tokenizer({i: bytes([i]) for i in range(256)}, [])
    with pytest.raises(ValueError, match=r"no special token that stands before a text"):
        Scorer(Transformer(ModelConfig(vocab_size=256)), without)


def test_the_harness_gets_one_of_its_own_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the package, which is large: its class is the base, its bookkeeping is there."""

    class LM:
        def __init__(self) -> None:
            self._rank, self._world_size = 0, 1

        @property
        def world_size(self) -> int:
            return self._world_size

    write_corpus(tmp_path / "text", 20)
    train(tiny_recipe(tmp_path / "text", probes=0, steps=2), tmp_path / "run")
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ValueError, match=r"pip install lm-eval"):
        for_lm_eval(tmp_path / "run")
    for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["lm_eval.api.model"], "LM", LM, raising=False)
    asked: Any = for_lm_eval(tmp_path / "run", device="cpu")
    assert LM in type(asked).__mro__ and asked.world_size == 1
    assert asked.loglikelihood_rolling([Asked(("the cat",))])[0] < 0
    assert len(asked.tokenizer_name) == 64 and asked.chat_template(False) == ""
