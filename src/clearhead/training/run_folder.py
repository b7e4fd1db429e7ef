"""What lies where in the folder of a run.

recipe.toml      every choice, filled in       metrics.jsonl   one line per step
model.json       the model's config            loss.png        the curves
tokenizer.json   the vocabulary                samples.txt     what the model wrote along the way
checkpoints/     step-00001200/ ...            data/           token shards, unless they were given
"""

import json
from pathlib import Path

import torch

from clearhead.model.config import ModelConfig
from clearhead.model.transformer import Transformer
from clearhead.text.tokenizer import Tokenizer
from clearhead.training.checkpoint import load_checkpoint
from clearhead.training.recipe import Recipe, find_recipe, load_recipe


class RunFolder:
    """The paths of one run, and what can be read back from them."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.recipe_file = self.path / "recipe.toml"
        self.model_file = self.path / "model.json"
        self.tokenizer_file = self.path / "tokenizer.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self.curve_file = self.path / "loss.png"
        self.samples_file = self.path / "samples.txt"
        self.data = self.path / "data"
        self.checkpoints = self.path / "checkpoints"

    def exists(self) -> bool:
        """Whether a run was started here."""
        return self.recipe_file.is_file()

    def recipe(self) -> Recipe:
        """The recipe this run was started with."""
        self._need(self.recipe_file)
        return load_recipe(self.recipe_file)

    def config(self) -> ModelConfig:
        """The config of this run's model."""
        self._need(self.model_file)
        try:
            values = json.loads(self.model_file.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{self.model_file} is not valid JSON: {error}") from None
        if not isinstance(values, dict):
            raise ValueError(f"{self.model_file} must hold a JSON object of model settings")
        return ModelConfig.from_dict(values)

    def write_config(self, config: ModelConfig) -> None:
        """Write model.json."""
        self.model_file.write_text(json.dumps(config.to_dict(), indent=2) + "\n", encoding="utf-8")

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of this run."""
        self._need(self.tokenizer_file)
        return Tokenizer.load(self.tokenizer_file)

    def model(self, device: torch.device | str = "cpu") -> tuple[Transformer, int]:
        """The model with the weights of the newest valid checkpoint, in eval mode, and that checkpoint's
        step.
        """
        model = Transformer(self.config(), seed=0)
        state = load_checkpoint(self.path, model)
        return model.to(device).eval(), int(state["step"])

    def _need(self, file: Path) -> None:
        if not file.is_file():
            raise FileNotFoundError(
                f"{self.path} holds no run: {file.name} is missing; "
                "give a folder that `clearhead train` wrote"
            )


def load_run(path: str | Path, device: torch.device | str = "cpu") -> tuple[Transformer, Tokenizer]:
    """The model and the tokenizer of a run. Raises ValueError when they do not belong together."""
    run = RunFolder(path)
    tokenizer = run.tokenizer()
    model, _ = run.model(device)
    if tokenizer.vocab_size != model.config.vocab_size:
        raise ValueError(
            f"{run.tokenizer_file} has {tokenizer.vocab_size} tokens but the model of {run.path} has "
            f"{model.config.vocab_size}; they belong to different runs"
        )
    return model, tokenizer


def find_config(what: str | Path) -> ModelConfig:
    """The model config of a run's folder, of a recipe, or of a model.json."""
    path = Path(what)
    if path.is_dir():
        return RunFolder(path).config()
    if path.suffix == ".json":
        return RunFolder(path.parent).config()
    return load_recipe(find_recipe(what)).model
