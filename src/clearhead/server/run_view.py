"""A run that is looked at, while it trains or later: its log, its samples, and the weights of its steps.

    steps      the probes and checkpoints that lie in its folder: each can be gone back to
    put        gives the model the weights of a step, their hashes checked; the last few stay in memory
    summary    the log as it stands in metrics.jsonl, of a long one every n-th line; the samples

Nothing is ever written: a run does not notice that it is looked at. A copy of the folder does as well.
"""

import json
import math
import os
import re
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from clearhead.generation.decode import END_OF_TEXT
from clearhead.inspector.passes import Question
from clearhead.model.transformer import Transformer
from clearhead.text.foreign import AnyTokenizer
from clearhead.training.checkpoint import MODEL, load_checkpoint, step_of, steps_in
from clearhead.training.data import data_folder, open_data
from clearhead.training.durable import MANIFEST
from clearhead.training.norms import norm_of, part_of
from clearhead.training.run_folder import RunFolder

MOST_HELD = 512_000_000  # bytes of weights in memory
MOST_LINES = 2_000  # of the log in one answer
MOST_SAMPLES = 100
LONGEST_SAMPLE = 2_000  # characters
LONG_ENOUGH = 8  # tokens of a sentence that is worth a map
PROBE_TOKENS = 32
MOST_NORMS = 200  # lines with the norms of the model's parts in one answer
NORMS = ("weight_norm/", "update_norm/", "idle_units/", "expert_load/")
COLUMNS = ("step", "loss", "lr", "norm", "tokens_per_second")


@dataclass(frozen=True)
class Held:
    """The weights of one step. `version`: the hash of their file; `mark`: says whether it was replaced."""

    version: str
    mark: tuple[str, int]
    tensors: dict[str, Tensor]

    @property
    def n_bytes(self) -> int:
        """The memory they take."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


class RunView:
    """One run and one model that takes the weights of any of its steps. Only for one thread at a time."""

    def __init__(self, path: str | Path, device: Any = "cpu") -> None:
        self.run = RunFolder(path)
        self.recipe = self.run.recipe()
        self.tokenizer: AnyTokenizer = self.run.tokenizer()
        self.model = Transformer(self.run.config(), seed=0).to(device).eval()
        if self.tokenizer.vocab_size > self.model.config.vocab_size:
            raise ValueError(
                f"{self.run.tokenizer_file} has {self.tokenizer.vocab_size} tokens but the model of "
                f"{self.run.path} has {self.model.config.vocab_size}; they belong to different runs"
            )
        self.held: OrderedDict[int, Held] = OrderedDict()
        self.current: Held | None = None
        self.stories: OrderedDict[tuple[str, tuple[int, ...]], dict[str, Any]] = OrderedDict()
        self.ways: dict[tuple[str, str], dict[str, float]] = {}  # between two weights, part by part
        self.put(self.newest())

    # ------------------------------------------------------------------------------------------- weights

    def folders(self) -> dict[int, list[Path]]:
        """Step -> where its weights lie, in the order of the steps."""
        found: dict[int, list[Path]] = {}
        for path in (*steps_in(self.run.checkpoints), *steps_in(self.run.probes)):
            found.setdefault(step_of(path), []).append(path)
        return dict(sorted(found.items()))

    def newest(self) -> int:
        """The step of the newest checkpoint; before there is one, of the newest probe."""
        places = steps_in(self.run.checkpoints) or steps_in(self.run.probes)
        if places:
            return step_of(places[0])
        raise FileNotFoundError(
            f"{self.run.path} holds no weights yet: its first checkpoint comes after step "
            f"{self.recipe.train.save_every}; try again then"
        )

    def step(self, asked: object) -> int:
        """The step that a request names; None means the newest. ValueError if its weights are not kept."""
        if asked is None:
            return self.newest()
        there = self.folders()
        if type(asked) is int and (asked in there or asked in self.held):
            return asked
        known = ", ".join(map(str, there))
        raise ValueError(f"the weights of step {asked!r:.20} are not kept; there are those of steps {known}")

    def place(self, step: int | None) -> str:
        """The folder with the weights of a step; nothing if there is none."""
        places = [] if step is None else self.folders().get(step, [])
        return str(places[-1]) if places else ""

    def put(self, step: int) -> str:
        """Give the model the weights of a step; the hash of their file. KeyError when they are gone."""
        held, mark = self.held.get(step), self._mark(step)
        if held is None or (mark is not None and mark != held.mark):
            held = self.held[step] = self._read(step)
        if self.current is not held:
            self.model.load_state_dict(held.tensors)
            self.current = held
        self.held.move_to_end(step)
        while len(self.held) > 1 and sum(each.n_bytes for each in self.held.values()) > MOST_HELD:
            self.held.popitem(last=False)
        return held.version

    def _mark(self, step: int) -> tuple[str, int] | None:
        name = f"step-{step:08d}"
        for folder in (self.run.probes, self.run.checkpoints):
            try:
                return str(folder / name), (folder / name / MANIFEST).stat().st_mtime_ns
            except OSError:
                continue
        return None

    def _read(self, step: int) -> Held:
        problems = []
        for path in self.folders().get(step, []):
            try:
                mark = self._mark(step)
                version = json.loads((path / MANIFEST).read_bytes())["files"][MODEL]["sha256"]
                load_checkpoint(path, self.model)
            except (OSError, ValueError, KeyError, TypeError) as error:
                problems.append(f"{error}")
                continue
            tensors = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
            return Held(version, mark or ("", 0), tensors)
        if problems:
            raise ValueError(f"step {step} cannot be opened: {problems[0]}")
        raise KeyError(f"the weights of step {step} are no longer there; choose another step")

    def moved(self, step: int) -> dict[str, Any]:
        """How far each part of the model has come since the kept step before: |w - w before| / |w|.

        {since, parts}; nothing for the first kept step. The model has the weights of `step` afterwards.
        """
        before = [other for other in self.folders() if other < step]
        if not before:
            self.put(step)
            return {"since": None, "parts": {}}
        versions = self.put(before[-1]), self.put(step)
        if versions not in self.ways:
            old, new = (self._tensors(at) for at in (before[-1], step))
            self.put(step)
            parts: dict[str, list[str]] = {}
            for name in new:
                parts.setdefault(part_of(name), []).append(name)
            self.ways[versions] = {
                part: float(norm_of([new[n] - old[n] for n in names]) / norm_of([new[n] for n in names]))
                for part, names in parts.items()
            }
        return {"since": before[-1], "parts": self.ways[versions]}

    def _tensors(self, step: int) -> dict[str, Tensor]:
        """The weights of a step that can be learned, by name."""
        self.put(step)
        return {name: self.held[step].tensors[name] for name, _ in self.model.named_parameters()}

    # ----------------------------------------------------------------------------------------------- log

    def text(self) -> str:
        """The probe sentence: the prompt of the samples, or where that is short, text of its kind.

        That is what the model last wrote to it, or if it writes no whole characters yet, what it never saw.
        """
        prompt = self.recipe.train.sample_prompt
        written = [s["text"].partition("\ufffd")[0] for s in self.samples() if s["text"].startswith(prompt)]
        for text in (prompt, *written[:-2:-1], self._unseen()):
            if text and len(self.tokenizer.encode(text)) >= LONG_ENOUGH:
                return text if text == prompt else self._cut(text)
        return prompt or "0"

    def _cut(self, text: str) -> str:
        tokens = self.tokenizer.encode(text)[: min(PROBE_TOKENS, self.model.config.max_len)]
        return self.tokenizer.decode(tokens).rstrip("\ufffd")

    def _unseen(self) -> str:
        """How the validation text begins; nothing where the run was copied without its data."""
        try:
            data = open_data(data_folder(self.recipe.data, self.run), self.tokenizer)
            return self.tokenizer.decode(data.validation.tokens[:PROBE_TOKENS].tolist()).partition(
                END_OF_TEXT
            )[0]
        except (OSError, ValueError):
            return ""

    def samples(self) -> list[dict[str, Any]]:
        """What the model wrote, and after how many steps."""
        try:
            raw = self.run.samples_file.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return []
        parts = re.split(r"^--- step (\d+)\n", raw, flags=re.MULTILINE)[1:]
        pairs = zip(parts[::2], parts[1::2], strict=True)
        found = [
            {"step": int(step), "text": text.removesuffix("\n")[:LONGEST_SAMPLE]} for step, text in pairs
        ]
        return found[-MOST_SAMPLES:]

    def summary(self) -> dict[str, Any]:
        """All that the page draws of a run, but for what needs the model."""
        tail = Tail(self.run.metrics_file)
        _, entries = tail.read()
        steps = [entry for entry in entries if "loss" in entry]
        every = max(1, math.ceil(len(steps) / MOST_LINES))
        drawn = steps[::every] + (steps[-1:] if steps and (len(steps) - 1) % every else [])
        return {
            "name": self.run.path.resolve().name,
            "steps": self.recipe.train.steps,
            "done": steps[-1]["step"] + 1 if steps else 0,
            "every": every,
            "lines": {name: [entry.get(name) for entry in drawn] for name in COLUMNS},
            "validation": [entry for entry in entries if "validation_loss" in entry],
            "norms": norms_in(steps),
            "samples": self.samples(),
            "milestones": list(self.folders()),
            "newest": self.newest(),
            "cost": self.cost(),
            "place": tail.place,
        }

    def cost(self) -> dict[str, float]:
        """Seconds that training took, and probes beside it, as the newest probe says."""
        for path in steps_in(self.run.probes):
            try:
                about = json.loads((path / "state.json").read_bytes())["state"]
                return {name: float(about[name]) for name in ("training_seconds", "probe_seconds")}
            except (OSError, ValueError, KeyError, TypeError):
                continue
        return {}

    # ------------------------------------------------------------------------------------------ remember

    def remember(self, version: str, question: Question, chapter: dict[str, Any]) -> None:
        """Keep what a step says to a text."""
        self.stories[version, question.ids] = chapter
        while len(self.stories) > 1000:
            self.stories.popitem(last=False)


def norms_in(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the trainer noted of the model's parts (train.norms_every), of many lines some with the last."""
    found = [
        {name: value for name, value in entry.items() if name == "step" or name.startswith(NORMS)}
        for entry in entries
        if any(name.startswith(NORMS) for name in entry)
    ]
    every = max(1, math.ceil(len(found) / MOST_NORMS))
    return found[::every] + (found[-1:] if found and (len(found) - 1) % every else [])


class Tail:
    """The lines that are added to a log. `place`: how far it was read, as text that can be gone on from."""

    def __init__(self, file: Path, place: str = "") -> None:
        self.file = file
        found = re.fullmatch(r"(\d{1,19})-(\d{1,19})", place, re.ASCII)
        self.node, self.offset = (int(found[1]), int(found[2])) if found else (-1, 0)

    @property
    def place(self) -> str:
        """Which file, and how many bytes of it were read."""
        return f"{max(self.node, 0)}-{self.offset}"

    def read(self) -> tuple[bool, list[dict[str, Any]]]:
        """Whether the log was begun anew or cut back, and the whole lines that came since the last call."""
        try:
            with self.file.open("rb") as file:
                about = os.fstat(file.fileno())
                anew = about.st_ino != self.node or about.st_size < self.offset
                if anew:
                    self.node, self.offset = about.st_ino, 0
                file.seek(self.offset)
                raw = file.read()
        except OSError:
            return False, []
        raw = raw[: raw.rfind(b"\n") + 1]
        self.offset += len(raw)
        entries = []
        for line in raw.splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if isinstance(entry, dict) and type(entry.get("step")) is int:
                entries.append(entry)
        return anew, entries
