"""The last page of `clearhead demo`: what the trained model is worth, beside what everybody knows.

Its bits per byte on the validation text stand beside those of gzip, xz, and xz primed with the training text;
then the model writes a function.
"""

from collections.abc import Callable
from pathlib import Path

from clearhead.generation.decode import generate
from clearhead.model.transformer import Transformer
from clearhead.text.compressors import gzip_bits, primed_xz_bits, xz_bits
from clearhead.text.corpus import open_corpus, split_corpus
from clearhead.text.foreign import AnyTokenizer
from clearhead.training.data import data_folder, open_data
from clearhead.training.evaluate import evaluate
from clearhead.training.recipe import DataConfig
from clearhead.training.run_folder import RunFolder, load_run

PROMPT = 'def read_lines(path):\n    """Return'


def run_demo(folder: Path, say: Callable[[str], None]) -> None:
    """Measure the model in `folder` on its validation text, the compressors too, and let it speak."""
    run = RunFolder(folder)
    model, tokenizer = load_run(folder)
    recipe = run.recipe()
    data = open_data(data_folder(recipe.data, run), tokenizer)
    context = recipe.train.context_length
    result = evaluate(
        model,
        data.validation,
        context_length=context,
        stride=max(1, context // 2),
        document_mask=recipe.train.document_mask,
    )
    training, validation = split_text(recipe.data)
    say(f"\n{len(validation):,} bytes of validation text that nobody has seen, in bits per byte:")
    say(f"  gzip -9                               {gzip_bits(validation):.3f}")
    say(f"  xz -9e                                {xz_bits(validation):.3f}")
    say(f"  xz -9e primed with the training text  {primed_xz_bits(validation, training):.3f}")
    say(f"  this model                            {result.bits_per_byte:.3f}")
    say(f"\nThe model writes a function:\n\n{write_function(model, tokenizer)}")
    say(f"\nThe curve: {run.curve_file}\nThe model: {run.checkpoints}")
    say(f'More from it: clearhead generate {folder} "class "')


def write_function(model: Transformer, tokenizer: AnyTokenizer) -> str:
    """The model's continuation of a function's first line, up to where the next thing starts."""
    text = generate(
        model,
        PROMPT,
        tokenizer=tokenizer,
        max_new_tokens=120,
        temperature=0.6,
        top_p=0.9,
        seed=1,
        stop=("\ndef ", "\nclass ", "\n@", "\nif __name__"),
    )
    return PROMPT + str(text)


def split_text(data: DataConfig) -> tuple[bytes, bytes]:
    """The training and the validation text of a corpus, documents joined, as UTF-8."""
    parts: dict[str, list[str]] = {"train": [], "validation": []}
    corpus = open_corpus(data.source, field=data.field, document_separator=data.document_separator)
    for split, text in split_corpus(corpus):
        parts[split].append(text)
    return "".join(parts["train"]).encode("utf-8"), "".join(parts["validation"]).encode("utf-8")
