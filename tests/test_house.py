"""The house rules of CONTRIBUTING.md, each kept by a test."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "clearhead"

# The order in which text becomes the next token. Imports only look back.
CHAPTERS = ["text", "model", "published", "generation", "training", "inspector", "server"]
FILES = {
    "text": """workers pretokenize documents counting bpe normalise incremental merging definition encoder
        tokenizer_json formats usage tokenizer pieces sentencepiece
        older_files foreign frame sandbox chat corpus compressors shards prepare spread batches
        examples rows example_files token_files encode_examples padded""",
    "model": """config_fields config_parts config tap products layers initial position cache masks attention
        grouped experts block heads stack transformer summary""",
    "published": """course mapping quirks families families_experts families_encoders
        families_encoder_decoders storage weights layout
        gguf_file gguf models original similarity twins selfcheck""",
    "generation": "sample reply special_ids window decode conversation",
    "training": """scores sharded objectives masking schedules optim muon average spikes activations memory
        demands durable recipe norms learner tensor_files named_tensors lora restore checkpoint
        saver run_folder kept_rows data verify
        evaluate example_data example_tasks tasks start predict report probe machine tensor_parallel parallel
        ahead budget step dry_run loop sweep harness demo""",
    "inspector": """record trace cells arithmetic rules rules_attention rules_stream provenance
        spelling manifest views kept anatomy growth passes sweeps""",
    "server": """wire page_files run_view reading sides summary asides session streams saved export guard app
        runs look""",
}

COMMAND_LINE = [
    "cli.py",
    "cli_flags.py",
    "cli_help.py",
    "cli_text.py",
    "cli_train.py",
    "cli_runs.py",
    "cli_ranks.py",
    "cli_sweep.py",
    "cli_tasks.py",
    "cli_models.py",
]

FAMILIES = [
    "gpt2",
    "llama",
    "mistral",
    "qwen",
    "gemma",
    "phi",
    "olmo",
    "mixtral",
    "deepseek",
    "bert",
    "roberta",
    "bart",
    "marian",
    "smollm",
]


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")


def imports_of(path: Path, top_level_only: bool = False) -> set[str]:
    """The clearhead modules that a file imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return found


def place(module: str) -> tuple[int, int] | None:
    """(chapter, place in the chapter) of a module; None for what stands outside the chapters."""
    parts = module.split(".")
    if len(parts) < 3 or parts[0] != "clearhead" or parts[1] not in FILES:
        return None
    return CHAPTERS.index(parts[1]), FILES[parts[1]].split().index(parts[2])


def test_every_file_has_its_place_in_the_reading_order() -> None:
    listed = {f"clearhead.{chapter}.{name}" for chapter, names in FILES.items() for name in names.split()}
    there = {name_of(p) for p in modules() if p.name != "__init__.py" and p.parent != SOURCE}
    assert there == listed


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_imports_only_look_back(path: Path) -> None:
    here = place(name_of(path))
    if here is None:
        assert path.name == "__init__.py" or path.name in COMMAND_LINE
        return
    ahead = [module for module in imports_of(path) if (there := place(module)) is not None and there >= here]
    assert not ahead, f"{name_of(path)} imports what comes later: {ahead}"


@pytest.mark.parametrize("path", sorted((SOURCE / "text").glob("*.py")), ids=name_of)
def test_text_imports_no_torch(path: Path) -> None:
    heavy = {m for m in imports_of(path, top_level_only=True) if m.split(".")[0] in ("torch", "transformers")}
    assert not heavy


def test_importing_clearhead_loads_nothing_heavy_and_says_nothing() -> None:
    code = (
        "import sys, clearhead\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules, 'import clearhead is not light'\n"
        "from clearhead import Tokenizer, train_bpe\n"
        "assert 'torch' not in sys.modules, 'a tokenizer needs no torch'\n"
        "import logging\n"
        "assert not logging.getLogger().handlers, 'logging was configured at import'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_every_public_name_resolves() -> None:
    import clearhead

    for name in clearhead.__all__:
        assert getattr(clearhead, name) is not None


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_no_print_in_the_library(path: Path) -> None:
    calls = [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert path.name in COMMAND_LINE or not calls


@pytest.mark.parametrize("path", sorted((SOURCE / "model").glob("*.py")), ids=name_of)
def test_no_model_code_branches_on_a_family(path: Path) -> None:
    """Docstrings and comments may say who uses a choice; code may not know."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    named = [name for name in names for family in FAMILIES if family in name.lower()]
    assert not named
    assert "hasattr" not in names


def test_taps_have_unique_names_within_a_module_class() -> None:
    """A tap's full name is module path + name, so a name may stand once in a class and never be a child's
    name.
    """
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ClassDef):
                continue
            taps = [
                call.args[0].value
                for call in ast.walk(node)
                if isinstance(call, ast.Call)
                and isinstance(call.func, ast.Name)
                and call.func.id == "tap"
                and isinstance(call.args[0], ast.Constant)
            ]
            assert len(taps) == len(set(taps)), f"{path.name}: {node.name} taps a name twice: {taps}"


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_files_are_opened_as_utf8(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute | ast.Name):
            continue
        called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
        keywords = {keyword.arg for keyword in node.keywords}
        if called in ("read_text", "write_text"):
            assert "encoding" in keywords, f"{path.name}:{node.lineno} {called} without encoding"
        if called == "open" and not any(
            isinstance(a, ast.Constant) and isinstance(a.value, str) and "b" in a.value for a in node.args
        ):
            mode = [a.value for a in node.args if isinstance(a, ast.Constant)]
            is_text = bool(mode) and set(str(mode[-1])) <= set("rwax+t")
            assert not is_text or "encoding" in keywords, f"{path.name}:{node.lineno} open without encoding"


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_nothing_is_unpickled(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.search(
        r"\bimport pickle\b|\bpickle\.loads?\b|weights_only\s*=\s*False|allow_pickle\s*=\s*True", text
    )
    assert not re.search(r"\btorch\.load\((?![^)]*weights_only=True)", text)
    called = {
        n.func.id
        for n in ast.walk(ast.parse(text))
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
    }
    assert not called & {"eval", "exec"}


def test_every_file_tells_its_purpose() -> None:
    silent = [
        name_of(p) for p in modules() if not ast.get_docstring(ast.parse(p.read_text(encoding="utf-8")))
    ]
    assert not silent


def test_the_tests_that_docs_name_exist() -> None:
    """The tables of docs/reliability.md and CONTRIBUTING.md point at tests, by file and name."""
    root = SOURCE.parents[1]
    for document in (root / "docs" / "reliability.md", root / "CONTRIBUTING.md"):
        named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", document.read_text(encoding="utf-8"))
        assert len(named) > 5
        for file, test in named:
            assert f"def {test}" in (root / file).read_text(encoding="utf-8"), (
                f"{document.name}: {file} {test}"
            )
