"""Reward models and critics: Hugging Face sequence classifiers with one label that read packed rows."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.modeling_layers import GenericForSequenceClassification

from openrlhf.errors import ErrorCode, UsageError
from openrlhf.models.backbone import RowModel, action_states
from openrlhf.models.checkpoint_layout import CLASSIFIER_HEAD, head_name
from openrlhf.models.configurations import apply_kwargs, check_class, load_config, load_unquantized
from openrlhf.models.loading import check_loaded, check_model, load_for_rows
from openrlhf.rows import PackedRow


class ScoreModel(RowModel):
    """A reward model with a scalar head, which scores each action."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.head_name = head_name(model.config)
        # Only the class changes, so parameter names and ZeRO-3's hooks on the module remain.
        getattr(model, self.head_name).__class__ = ScoreHead

    def forward(self, row: PackedRow) -> Tensor:
        """Returns the scores (A,) float32. Each is read at the action's own token."""
        return self.read(row, row.actions)

    def read(self, row: PackedRow, places: Tensor) -> Tensor:
        """Returns the head's outputs (A,) float32 at `places` (A,), the index of one token for each
        action."""
        states = action_states(self.model, row, places)
        outputs = getattr(self.model, self.head_name)(states.hidden)
        return states.whole(outputs[:, 0].clone())  # FSDP warns of a module that returns a view


class ValueModel(ScoreModel):
    """A critic. The value of an action is that of the state in which it was sampled, so it is read at the
    token before the action."""

    def forward(self, row: PackedRow) -> Tensor:
        """Returns the values (A,) float32."""
        return self.read(row, row.actions - 1)


class ScoreHead(nn.Linear):
    """A scalar head that computes in float32, whatever the dtype of its weight. bf16 would round scores of
    about 3 to multiples of 1/64, so different answers to one prompt would often have the same score. The head
    is called as a module so that ZeRO-3 gathers its weight."""

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        return F.linear(input.float(), self.weight.float(), bias)


def load_scorer(
    path: str,
    *,
    flag: str,
    head_prefix: str = CLASSIFIER_HEAD,
    tokenizer: PreTrainedTokenizerBase | None = None,
    images: bool = False,
    trained: bool = False,
    model_kwargs: Mapping[str, Any] = {},
    **options: Any,
) -> ScoreModel:
    """Loads a reward model, or a language model with a new scalar head. With `trained`, raises UsageError if
    the model has no trained head.

    head_prefix: name of the head in saved files; a `value_head_prefix` in the model's config.json takes
    precedence. tokenizer: required if the model will be saved. Tokenizer and model get the same padding
    token, which is not the end-of-sequence token. images: rows may have images. model_kwargs: see
    `apply_kwargs`. `options`: see `load_for_rows`.
    """
    config = load_unquantized(path, flag)
    options |= apply_kwargs(config, model_kwargs, path, flag)
    name = getattr(config, "value_head_prefix", None) or head_prefix
    config.num_labels = 1
    config.value_head_prefix = name
    if images:
        register_classifier(config)
    if tokenizer is not None:
        tokenizer.pad_token_id = config.pad_token_id = padding_token_id(tokenizer, config)
    names = {rf"^{name}\.": f"{CLASSIFIER_HEAD}."} if name != CLASSIFIER_HEAD else None
    classifier = AutoModelForSequenceClassification
    check_class(classifier, config, path, flag)
    model, loaded = load_for_rows(classifier, config, path, images=images, key_mapping=names, **options)
    check_loaded(loaded, path, flag, new=f"{CLASSIFIER_HEAD}.")
    if trained and any(key.startswith(f"{CLASSIFIER_HEAD}.") for key in loaded["missing_keys"]):
        raise _no_head(path, flag, name)
    if name != CLASSIFIER_HEAD:
        head = model.score
        del model.score
        setattr(model, name, head)
    return ScoreModel(model)


def register_classifier(config: PreTrainedConfig) -> None:
    """Registers a sequence classifier for a vision-language architecture without one in transformers. The
    class combines transformers' generic classifier with the architecture's base class, and loads the
    generator's files with the same renaming of weights."""
    if type(config) in AutoModelForSequenceClassification._model_mapping:
        return
    generator = AutoModelForImageTextToText._model_mapping[type(config)]
    pretrained = next(c for c in generator.__mro__[1:] if issubclass(c, PreTrainedModel))
    name = generator.__name__.replace("ForConditionalGeneration", "ForSequenceClassification")
    classifier = type(name, (GenericForSequenceClassification, pretrained), {"config_class": type(config)})
    AutoModelForSequenceClassification.register(type(config), classifier, exist_ok=True)
    names = (get_checkpoint_conversion_mapping(key) for key in (generator.__name__, config.model_type))
    if (renaming := next(filter(None, names), None)) is not None:
        register_checkpoint_conversion_mapping(name, renaming, overwrite=True)


def check_reward_model(path: str, flag: str, head_prefix: str) -> None:
    """Raises UsageError if `path` is not a reward model. Loads no weights. For a model on the hub only the
    configuration is checked."""
    check_model(path, flag)
    name = getattr(load_config(path, flag), "value_head_prefix", None) or head_prefix
    files = sorted(Path(path).glob("[!.]*.safetensors"))
    heads = [head for file in files for head in _heads(file, (f"{name}.weight", f"{CLASSIFIER_HEAD}.weight"))]
    if files and not heads:
        raise _no_head(path, flag, name)
    if heads and heads[0] != 1:
        text = f"its head has {heads[0]} labels; a reward model has one."
        raise UsageError(ErrorCode.INVALID_MODEL, text, flag=flag, value=path)


def _heads(file: Path, names: tuple[str, ...]) -> list[int]:
    """Returns the number of labels of each head in a file of weights."""
    with safe_open(file, "pt") as weights:
        return [weights.get_slice(key).get_shape()[0] for key in weights.keys() if key in names]  # noqa: SIM118


def _no_head(path: str, flag: str, name: str) -> UsageError:
    text = (
        f"it has no scalar head called {name} or {CLASSIFIER_HEAD}, so it is no reward model.\nTrain one "
        "with `openrlhf rm`, or name its head with --ds.value_head_prefix."
    )
    return UsageError(ErrorCode.INVALID_MODEL, text, flag=flag, value=path)


def score_statistics(config: PreTrainedConfig, path: str) -> tuple[float, float]:
    """Returns the mean and the standard deviation of the scores, which `openrlhf rm` writes to the model's
    config.json. Raises UsageError if they are missing or the standard deviation is not positive."""
    mean, std = getattr(config, "mean", None), getattr(config, "std", None)
    if mean is not None and std is not None and std > 0:
        return float(mean), float(std)
    if mean is None or std is None:
        problem = "no mean and std, which `openrlhf rm` writes.\nRemove the flag, or add them."
    else:
        problem = f"std {std}: the scores do not vary.\nTrain it on pairs that differ, or remove the flag."
    text = f"{path}/config.json has {problem}"
    raise UsageError(ErrorCode.INVALID_MODEL, text, flag="--reward.normalize_enable")


def padding_token_id(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> int:
    """Returns a padding token that the model embeds and that is not the end-of-sequence token. transformers
    reads a score at the last token that is not padding, which would be the wrong one if the end-of-sequence
    token were the padding. Raises UsageError if there is no such token."""
    candidates = [tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id]
    candidates += [id for id, token in tokenizer.added_tokens_decoder.items() if token.special]
    size, end = config.get_text_config().vocab_size, tokenizer.eos_token_id
    usable = [token for token in candidates if token is not None and token != end and token < size]
    if not usable:
        text = (
            "no special token that the model embeds differs from the one that ends a sequence, so padding "
            "would look like an end.\nAdd a pad token to the tokenizer, and its embedding to the model."
        )
        raise UsageError(ErrorCode.INVALID_MODEL, text, value=tokenizer.name_or_path)
    return usable[0]
