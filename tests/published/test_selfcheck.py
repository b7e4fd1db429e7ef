"""The table a user can run again: it covers every family, it is small numbers, and it notices injuries."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from clearhead.cli import main
from clearhead.published import selfcheck as module
from clearhead.published.selfcheck import Row, check_model, our_twin, selfcheck
from clearhead.published.twins import TWINS, model_type
from clearhead.published.weights import FAMILIES


def test_every_family_has_a_twin() -> None:
    assert {model_type(name) for name in TWINS} == set(FAMILIES)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "qwen3_moe", "deepseek_v3", "bert", "t5 v1.1"])
def test_a_family_passes_against_transformers(name: str, transformers: Any) -> None:
    """One family of each shape and kind here; `clearhead selfcheck` runs all."""
    rows = list(selfcheck([name]))
    assert all(row.ok for row in rows), [row for row in rows if not row.ok]
    paths = {row.path for row in rows}
    assert {"plain", "hidden states", "right padded", "left padded", "batched", "bf16", "float64"} < paths
    assert {"loss", "gradients", "files", "export"} < paths
    assert ("cached" in paths) == (name != "bert")
    assert {row.tolerance for row in rows if row.path == "plain"} == {2e-5 if name == "t5 v1.1" else 1e-5}


@pytest.mark.parametrize("name", TWINS)
def test_without_transformers_it_checks_against_float64(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "transformers_quietly", nothing_installed)
    rows = list(selfcheck([name]))
    assert all(row.ok for row in rows), [row for row in rows if not row.ok]
    assert {"plain", "left padded", "batched", "files"} < {row.path for row in rows}


def test_empty_cells_are_explained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line under the table says why cells are empty that transformers fills; none where it did."""
    monkeypatch.setattr(module, "transformers_quietly", nothing_installed)
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    main(["selfcheck", "--family", "gpt2"])
    lines = capsys.readouterr().out.splitlines()
    empty = [
        name.strip()
        for name, cell in zip(lines[0].split("|"), lines[2].split("|"), strict=True)
        if cell.strip() == "--"
    ]
    assert lines[3].startswith("the package transformers is not installed: ")
    assert lines[3].endswith(f"-- stands in {', '.join(empty)}; pip install transformers fills them")
    assert len(lines) == 5
    one_model = list(check_model("gpt2", our_twin("gpt2")))
    told = module.blank_note(one_model)
    assert told is not None and "-- stands in float64;" in told
    monkeypatch.setattr(module, "find_spec", lambda name: "there")
    assert module.blank_note(one_model) == (
        "transformers does not open this model: the other side is our own pass in float64, "
        "and -- stands in float64"
    )
    assert module.blank_note([*one_model, Row("gpt2", "float64", 0.0, 1e-5)]) is None


class nothing_installed:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        return None


def test_an_injury_is_noticed() -> None:
    """A changed bias is far above tolerance; a number that is none is no pass."""
    ours, other = our_twin("llama"), our_twin("llama")
    assert all(row.ok for row in check_model("llama", ours, tolerance=1e-5))
    with torch.no_grad():
        ours.decoder.blocks[1].attn.q.bias.add_(0.01)
    bad = module.gap(*(module.run(model, module.make_batch(other, "right")) for model in (ours, other)))
    assert bad > 1e-4
    assert not Row("x", "plain", float("nan"), 1e-5).ok and not Row("x", "plain", bad, 1e-5).ok


def test_a_row_is_json() -> None:
    row = Row("bert", "plain", 1e-6, 1e-5).to_dict()
    assert json.loads(json.dumps(row)) == {
        "family": "bert",
        "path": "plain",
        "max_abs_diff": 1e-6,
        "tolerance": 1e-5,
        "ok": True,
    }


def test_the_table_is_markdown() -> None:
    """Every path has its column, a missing one shows as --, and what is above tolerance is marked."""
    line = module.table_line([Row("bert", "plain", 0.0, 1e-5), Row("bert", "export", 2e-5, 1e-5)])
    rule = module.table_head().splitlines()[1]
    assert line.split() == f"| bert | 0 {'| -- ' * (len(module.COLUMNS) - 2)}| 2e-05! |".split()
    assert line.count("|") == rule.count("|") == len(module.COLUMNS) + 2


def test_the_docs_hold_the_table() -> None:
    text = (Path(__file__).parents[2] / "docs" / "published.md").read_text(encoding="utf-8")
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if line.count("|") > 10}
    assert lines.keys() == {*TWINS, "family", "-------------"}
    assert "!" not in "".join(lines.values())


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no family 'gpt5'; known: gpt2, llama"):
        next(selfcheck(["gpt5"]))
