"""A family of foreign checkpoints: how to recognize, load and export it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from multimodal.errors import CheckpointError, one_line
from multimodal.models.any_to_text import AnyToText
from multimodal.models.encoder_decoder import EncoderDecoder
from multimodal.models.speech.seq2seq import SpeechSeq2Seq
from multimodal.models.text import TextTransformer
from multimodal.models.vision.git import GIT
from multimodal.system.files import optional_json, printable
from multimodal.tokens.chat.format import ChatFormat
from multimodal.tokens.image.preprocessing import Preprocessing
from multimodal.tokens.text.hub.added import set_flags
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.weights.card import further_ends, searched
from multimodal.weights.fit import check_markers, check_size, check_values, check_vocabulary
from multimodal.weights.folder import Checkpoint, build, fill
from multimodal.weights.table import NameRow, Tensors, check, export_tensors, load_tensors

ACTIVATIONS = {  # ours by transformers' names
    "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "quick_gelu": "quick_gelu", "relu": "relu", "silu": "silu", "swish": "silu", "tanh": "tanh",
}  # fmt: skip
# models whose generate follows generation_config.json
SEARCHED = (TextTransformer, EncoderDecoder, AnyToText, GIT, SpeechSeq2Seq)


@dataclass(frozen=True)
class Family:
    """`has`, `lacks`: tensors that all of its files hold, and that none holds; `types`: values of `model_type` in its
    configurations, "" where one may lack it (none: any); `only`: a further condition.

    `defaults`: values of keys that a configuration leaves out, after `complete` has added what shapes imply.
    `config_from(config, tensors)` builds our frozen configuration and raises CheckpointError for what is not stated,
    rather than guess. `beside`: a JSON file by the weights, whose content the configuration gets under this name, else
    {}; the feature extractor in transformers 5's one file goes first. `tokenizer`, `preprocessing`, `chat` and `card`
    (facts for the card) read the folder, None for a bare file. `needs`: configuration file without which heads are
    unknown. `one_size`: images have the size of the configuration, as the original model takes no other."""

    name: str
    model: type[nn.Module]
    has: tuple[str, ...]
    config_from: Callable[[dict[str, Any], Tensors], Any]
    rows: Callable[[Any], list[NameRow]]
    tokenizer: Callable[[Path | None, dict[str, Any]], Tokenizer | None] = lambda folder, config: None
    preprocessing: Callable[[Path | None, dict[str, Any]], Preprocessing | None] = lambda folder, config: None
    chat: Callable[[Path | None, Tokenizer | None], ChatFormat | None] = lambda folder, tokenizer: None
    complete: Callable[[dict[str, Any], Tensors], dict[str, Any]] = lambda config, tensors: config
    card: Callable[[Path | None, dict[str, Any]], dict[str, Any]] = lambda folder, config: {}
    needs: str = ""
    one_size: bool = False
    beside: str = ""
    defaults: dict[str, Any] = field(default_factory=dict)
    types: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    only: Callable[[Tensors], bool] = lambda tensors: True

    def recognizes(self, tensors: Tensors, config: dict[str, Any]) -> bool:
        """`config`: the foreign configuration, {} for a bare file."""
        named = all(name in tensors for name in self.has) and not any(name in tensors for name in self.lacks)
        return named and (not self.types or config.get("model_type", "") in self.types) and self.only(tensors)

    def completed(self, config: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
        """The configuration with what it leaves out."""
        return self.defaults | self.complete(config, tensors)

    def load(self, tensors: Tensors, config: dict[str, Any], where: str, folder: Path | None = None) -> Checkpoint:
        """Build the checkpoint. Raises CheckpointError that begins with `where`."""
        with self.naming(where):
            if self.needs and not config:
                raise CheckpointError(f"{self.name} weights without {self.needs}, which has the number of heads")
            if self.beside:
                config = ({self.beside: feature_record(folder, self.beside)} if folder else {}) | config
            asked, search, ends = dict[str, Any](), dict[str, Any](), dict[str, Any]()
            if folder and issubclass(self.model, SEARCHED):
                search = optional_json(folder / "generation_config.json")
                asked, ends = searched(search) if search else searched(config, old=True), search or config
                if (start := search.get("decoder_start_token_id")) is not None:
                    config = config | {"decoder_start_token_id": start}
            config = self.completed(config, tensors)
            ours = self.config_from(config, tensors)
            check_values(ours, where)
            model = build(self.model, ours, len(tensors))
            rows = self.rows(ours)
            check(rows, model.state_dict(), tensors, where, architecture(config))
            fill(model, load_tensors(rows, tensors, where), where)
            tokenizer, preprocessing = self.tokenizer(folder, config), self.preprocessing(folder, config)
            if folder and tokenizer is not None:
                set_flags(tokenizer, folder)
            check_vocabulary(tokenizer, ours, where)
            if preprocessing is not None:
                check_size(preprocessing, ours, where, fixed=self.one_size)
            card = {"format": self.name, **self.card(folder, config)}
            if asked := asked | further_ends(ends, tokenizer):
                card["generation"] = asked
            chat = self.chat(folder, tokenizer)
            check_markers(chat, tokenizer, ours, where)
        return Checkpoint(model.eval(), tokenizer, preprocessing, where, card, chat=chat)

    @contextmanager
    def naming(self, where: str) -> Iterator[None]:
        """Turn what a wrong value in a foreign configuration raises into one error that names the file."""
        try:
            yield
        except KeyError as error:
            raise CheckpointError(f"{where}: {self.name} configuration lacks {error}") from None
        except CheckpointError as error:
            text = str(error)
            raise CheckpointError(text if text.startswith(where) else f"{where}: {text}") from None
        except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError, RuntimeError) as error:
            raise CheckpointError(f"{where}: invalid {self.name} configuration ({one_line(error, 200)})") from None

    def export(self, model: nn.Module) -> Tensors:
        """Tensors of the model under the family's names."""
        return export_tensors(self.rows(model.config), model.state_dict())


def activation(config: dict[str, Any], *keys: str) -> str:
    """Ours of the first of these keys that is stated. Raises CheckpointError for an unknown one."""
    key = next((key for key in keys if config.get(key) is not None), keys[0])
    if (value := config[key]) not in ACTIVATIONS:
        raise CheckpointError(f"config.json: {key} {value!r} is not supported")
    return ACTIVATIONS[value]


def renamed(names: dict[str, str]) -> Callable[[dict[str, Any], Tensors], dict[str, Any]]:
    """`complete` of a family that has other names for some keys."""
    return lambda config, tensors: {names.get(key, key): value for key, value in config.items()}


def architecture(config: dict[str, Any]) -> str:
    """Class that a foreign configuration names, or ""."""
    names = config.get("architectures")
    return printable(names[0])[:80] if isinstance(names, list) and names and isinstance(names[0], str) else ""


def feature_record(folder: Path, name: str) -> dict[str, Any]:
    """Record of the feature extractor, or else the file `name`; {} without either."""
    own = optional_json(folder / "processor_config.json").get("feature_extractor") or optional_json(folder / name)
    return own if isinstance(own, dict) else {}
