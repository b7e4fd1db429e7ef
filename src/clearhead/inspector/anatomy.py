"""The parts of one model by name, and how it is run to be looked at: without dropout, without gradients, and
with a look between two blocks at whether somebody still wants to know.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from clearhead.generation.window import evaluating
from clearhead.inspector.kept import Look, Question
from clearhead.inspector.manifest import LENS_HEADS, Json, describe_stack, map_rows, shape_of, stacks_of
from clearhead.inspector.record import Recorder
from clearhead.inspector.trace import trace
from clearhead.model.stack import Memory, Stack, View
from clearhead.model.transformer import Transformer

Stop = Callable[[], None]


class Harvest(Recorder):
    """A recorder that keeps the rows of the map, and of the attention weights what `keep` makes of them."""

    def __init__(self, rows: set[str], starts: dict[str, str], keep: Callable[[str, Tensor], None]) -> None:
        super().__init__(None, None)
        self.rows, self.starts, self.keep = rows, starts, keep
        self.given: dict[str, dict[str, Any]] = {}

    def on_enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name in self.starts:
            self.values[self.starts[name]] = args[0].detach()
        if name in self.rows:
            self.given[name] = kwargs

    def on_value(self, name: str, value: Tensor, module_path: str, tapped: bool) -> Tensor:
        if name in self.rows or name == "logits":
            self.values[name] = value.detach()
        elif tapped and name.endswith(".weights"):
            self.keep(module_path, value.detach())
        return value


class Anatomy:
    """A model and its parts. `example`: a question it can answer; from its trace the outline is drawn. `pad`:
    the token that fills up rows; where it stands nothing looks.
    """

    def __init__(self, model: nn.Module, example: Question, pad: int | None = None) -> None:
        self.model, self.modules, self.pad = model, list(model.modules()), pad
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        with evaluating(self.modules):
            self.outline = trace(model, self.tensor(example.ids[:2]), source=self.source(example))
        self.stacks: list[Json] = [describe_stack(*stack, self.outline) for stack in stacks_of(model)]
        self.main: Json | None = self.stacks[-1] if self.stacks else None
        self.main_name = None if self.main is None else self.main["name"]
        self.looks = [
            Look(attention["path"], stack["name"], number, attention["kind"] == "cross")
            for stack in self.stacks
            for number, layer in enumerate(stack["layers"])
            for attention in layer["attention"]
        ]
        self.map = {stack["name"]: map_rows(stack) for stack in self.stacks}
        self.blocks = [
            child
            for path, child in model.named_modules()
            if any(path == layer["name"] for stack in self.stacks for layer in stack["layers"])
        ]
        self.has_lens = isinstance(model, Transformer) and model.config.head in LENS_HEADS
        self.stop: Stop = lambda: None  # of the pass that runs

    def tensor(self, ids: Sequence[int]) -> Tensor:
        """A batch of one text."""
        return torch.tensor([list(ids)], dtype=torch.long, device=self.device)

    def source(self, question: Question) -> Tensor | None:
        """What an encoder-decoder reads first."""
        return None if question.source is None else self.tensor(question.source)

    def masks(self, question: Question) -> tuple[Bool[Tensor, "1 T"] | None, Bool[Tensor, "1 S"] | None]:
        """Which tokens of the text and of the source are real; None where all are.

        What the decoder of an encoder-decoder says is never padding here: some begin with that very token.
        """
        if question.source is None:
            return self._real(question.ids), None
        return None, self._real(question.source)

    def _real(self, ids: tuple[int, ...]) -> Bool[Tensor, "1 T"] | None:
        return None if self.pad is None or self.pad not in ids else self.tensor(ids) != self.pad

    def padded(self, question: Question) -> bool:
        """Whether some tokens only fill up a row."""
        return self.masks(question) != (None, None)

    def asked(self, question: Question) -> dict[str, Any]:
        """The arguments with which the model is called beside the tokens."""
        mask, source_mask = self.masks(question)
        told = {"mask": mask, "source": self.source(question), "source_mask": source_mask}
        return {name: value for name, value in told.items() if value is not None}

    def looking(self, look: Look, question: Question) -> tuple[Tensor, Tensor]:
        """The tokens that look, and those that are looked at."""
        ids = self.tensor(question.ids)[0]
        source = self.tensor(question.source or ())[0]
        if look.stack == "encoder" and question.source is not None:
            return source, source
        return ids, source if look.cross else ids

    @contextmanager
    def running(self, stop: Stop = lambda: None) -> Iterator[None]:
        """No dropout, no gradients, and a look at `stop`, which may raise, after every block."""
        self.stop = stop
        with ExitStack() as hooks:
            for block in self.blocks:
                hooks.callback(block.register_forward_hook(lambda module, args, output: stop()).remove)
            hooks.enter_context(evaluating(self.modules))
            hooks.enter_context(torch.no_grad())
            yield

    def harvest(self, keep: Callable[[str, Tensor], None]) -> Harvest:
        """A recorder of the rows of the map."""
        names = {name for rows in self.map.values() for name in rows}
        starts = {stack["layers"][0]["name"]: stack["start"] for stack in self.stacks if stack["layers"]}
        return Harvest(names, starts, keep)

    def n_bytes(self, question: Question) -> int:
        """About how many bytes a whole trace of this question holds."""
        length = len(question.ids)
        sizes = {"T": length, "S": max(length, len(question.source or ()))}
        total = 0
        for name, node in self.outline.nodes.items():
            numbers = self.outline.values[name].element_size()
            for size in shape_of(node, self.outline.values[name]):
                numbers *= sizes[size] if isinstance(size, str) else size
            total += numbers
        return total

    def main_stack(self) -> tuple[Stack, Json]:
        """The stack that speaks, and what the manifest says of it."""
        assert isinstance(self.model, Transformer) and self.main is not None
        return self.model.stack, self.main

    def row_before(self, block: str) -> str:
        """The row of the map that a block reads."""
        rows = self.map[block.split(".")[0]]
        return rows[rows.index(f"{block}.middle") - 1]

    def given(self, length: int, memory: Memory | None) -> dict[str, dict[str, Any]]:
        """What the blocks of the main stack are called with in a pass of this length."""
        stack, main = self.main_stack()
        places = torch.arange(length, device=self.device)
        view = stack.view(places, places, places, None, None)
        return {
            layer["name"]: self.options(number, view, memory) for number, layer in enumerate(main["layers"])
        }

    def options(self, layer: int, view: View, memory: Memory | None) -> dict[str, Any]:
        """The arguments of one block of the main stack, as the stack gives them."""
        stack, _ = self.main_stack()
        window = stack.windowed[layer]
        return {
            "rotation": view.rotations[window] if stack.turned[layer] else None,
            "mask": view.masks[window],
            "bias": view.bias,
            "memory": None if memory is None else memory.layers[layer],
        }
