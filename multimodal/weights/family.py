"""What a family of foreign checkpoints must say of itself."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from multimodal.errors import CheckpointError
from multimodal.tokens.image.preprocessing import Preprocessing
from multimodal.tokens.text.vocabulary import Tokenizer
from multimodal.weights.fit import check_size, check_vocabulary
from multimodal.weights.folder import Checkpoint, build, fill
from multimodal.weights.table import Row, Tensors, check, export_tensors, load_tensors


@dataclass(frozen=True)
class Family:
    """`recognises(tensors, config)`: by names, and by the configuration file where there is one ({} if none).

    `config_from(config, tensors)` makes our frozen configuration; what neither the file nor the shapes say is
    refused with CheckpointError, never guessed. `tokenizer` and `preprocessing` get the folder (or None for a
    bare file) and the foreign configuration, and return None where the model has none or they are not known.
    `complete` comes first and adds to the configuration what a file without one is known to mean. `card`: facts for the
    card that the folder holds."""

    name: str
    model: type[nn.Module]
    recognises: Callable[[Tensors, dict[str, Any]], bool]
    config_from: Callable[[dict[str, Any], Tensors], Any]
    rows: Callable[[Any], list[Row]]
    tokenizer: Callable[[Path | None, dict[str, Any]], Tokenizer | None] = lambda folder, config: None
    preprocessing: Callable[[Path | None, dict[str, Any]], Preprocessing | None] = lambda folder, config: None
    complete: Callable[[dict[str, Any], Tensors], dict[str, Any]] = lambda config, tensors: config
    card: Callable[[Path | None], dict[str, Any]] = lambda folder: {}

    def load(self, tensors: Tensors, config: dict[str, Any], where: str, folder: Path | None = None) -> Checkpoint:
        """The checkpoint as ours. Raises CheckpointError naming the tensor that is missing, extra or misshapen."""
        with self._naming(where):
            config = self.complete(config, tensors)
            ours = self.config_from(config, tensors)
            model = build(self.model, ours, len(tensors))
            rows = self.rows(ours)
            check(rows, model.state_dict(), tensors, where)
            fill(model, load_tensors(rows, tensors, where), where)
            tokenizer, preprocessing = self.tokenizer(folder, config), self.preprocessing(folder, config)
            check_vocabulary(tokenizer, ours, where)
            if preprocessing is not None:
                check_size(preprocessing, ours, where)
            card = {"format": self.name, **self.card(folder)}
        return Checkpoint(model.eval(), tokenizer, preprocessing, where, card)

    @contextmanager
    def _naming(self, where: str) -> Iterator[None]:
        """What a wrong value in a foreign configuration raises, as one error that names the file."""
        try:
            yield
        except KeyError as error:
            raise CheckpointError(f"{where}: {self.name} needs {error}, which is missing") from None
        except CheckpointError as error:
            text = str(error)
            raise CheckpointError(text if text.startswith(where) else f"{where}: {text}") from None
        except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError, RuntimeError) as error:
            cause = " ".join(str(error).split())[:200]
            raise CheckpointError(f"{where}: the {self.name} configuration cannot be used ({cause})") from None

    def export(self, model: nn.Module) -> Tensors:
        """The model's tensors under the family's names."""
        return export_tensors(self.rows(model.config), model.state_dict())
