"""Checks that a model computes packed rows as it computes their sequences one by one, and that its
tensor-parallel shards compute the same as the whole model. Every model is checked after it is loaded: on its
device, in its precision and under its engine, before training.

A list of architectures would not be enough, because whether a row may contain several sequences depends on
the code of the architecture, on the attention implementation, and on the versions of both. The checks
therefore run the model itself, on rows of two short sequences A and B:

    leaks       Replacing A must change nothing in B; replacing a token of B nothing before that token.
    equality    Hidden states of A and B in the row equal those of transformers' own forward of each alone.
    slices      Under sequence parallelism, the hidden states of each slice of A equal those of the whole.
    shards      Under tensor parallelism, hidden states and logits of B equal those of the model before it was
                cut, in float32: its rounding is so small that a plan which forgets one layer shows.
    head        Log-probs made of hidden states equal those of the model's own logits.
    Liger       Hidden states with Liger's kernels equal those with transformers' own.
    routers     With router replay, every layer's choice of experts can be replayed.
    prefixes    Hidden states of sequences with common prefixes, which are read once, equal those of a row
                without sharing, and so does the gradient of the embeddings. Ranks that gather their
                parameters compare hidden states alone.

A leak is measured relative to the effect of one replaced token on the rest of B. Rows of the same shape have
the same rounding, so the test needs little precision and does not depend on the scale of the weights. A small
copy of the model would not be enough, because it would run other kernels, in another precision, without the
engine.
"""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from openrlhf.data.cache import digest
from openrlhf.device import DEVICE_TYPE, compute_capability
from openrlhf.errors import ErrorCode, UsageError, first_line
from openrlhf.files import cache_folder, write_atomically
from openrlhf.models.attention import PACKED, CannotPack, broke_attention, of_text
from openrlhf.models.backbone import (
    RowLayout,
    RowModel,
    alone,
    get_row_layout,
    has_states,
    in_one_pass,
    inputs_alone,
)
from openrlhf.models.dropout import has_noise
from openrlhf.models.liger import transformers_kernels
from openrlhf.models.policy import get_head, transformed_logits
from openrlhf.models.prefixes import PrefixTree, build_tree
from openrlhf.models.router_replay import NotReplayed, Replay
from openrlhf.models.sequence_parallel import SequenceParallel
from openrlhf.models.tensor_parallel import check_planned, refusal, shard_matrices
from openrlhf.models.vision import SHAPES
from openrlhf.rows import PackedRow, Sample
from openrlhf.types import not_none, own_choice

logger = logging.getLogger(__name__)

MAX_LEAK = {torch.float32: 0.05, torch.float16: 0.2, torch.bfloat16: 0.2}
"""Maximum leak, relative to the effect of one replaced token on later tokens of its own sequence. Real leaks
have at least half of that effect. In half precision other tokens in a row may change the expert of a
token."""
MAX_ERROR = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.25}
"""Largest relative error of a hidden state or a gradient, as the median over tokens: about the rounding of
other kernels in a deep model. A lost window, cap or position changes hidden states by more."""
MAX_HEAD_ERROR = {torch.float32: 1e-4, torch.float16: 0.05, torch.bfloat16: 0.3}
"""Maximum error of log-probs in nats. One of the two computations rounds its logits, which have magnitudes of
tens, to the model's precision."""
MAX_PARTS_ERROR = 0.01
"""Maximum relative error of hidden states or logits between a model and its tensor-parallel shards, as the
median over tokens. Both compute in float32, which is more precise, but some architectures round to half
precision internally."""
STATE_KERNELS = ("causal_conv1d", "fla")
"""Packages with kernels for stateful layers, which transformers uses if they are installed."""
BROKEN_ATTENTION = (
    f"The kernel of packed attention failed (torch {torch.__version__} on {DEVICE_TYPE}), not the model.\n"
    "--ds.attn_implementation sdpa uses transformers' attention, whose memory grows with the square of "
    "a row's length."
)
LENGTHS = (23, 17)
"""Number of tokens of A and B."""
LONGEST = 1280
"""Maximum number of tokens of A, which must be longer than a sliding window."""


def resolve_row_layout(
    ask: Callable[[], Any], module: RowModel, *, zero_stage: int | None = None, tensor: int = 1
) -> RowLayout:
    """Determines how `module.model` must read rows, and configures it accordingly. Collective.

    ask: calls `module`, through its engine if it has one. zero_stage: ZeRO stage of that engine, if any.
    tensor: tensor-parallel size.

    Raises UsageError if the model leaks with the requested `--ds.attn_implementation`, attends to later
    tokens, has a head that is more than a linear layer, or fails another of the checks.
    """
    model = module.model
    entry = _cache_entry(model, zero_stage, tensor)
    found = _agreed(json.loads(entry.read_text(encoding="utf-8")) if entry.exists() else None)
    if found is None:
        with _evaluating(module), torch.no_grad():
            found = _agreed(_run_checks(_through(ask, module), model))
        if _is_first_rank():
            _keep(entry, found)
    if found["error"]:
        raise UsageError(ErrorCode.UNSUPPORTED, found["error"], flag=found["flag"], value=found["value"])
    if found["reason"]:
        read_one_by_one(model)
        if _is_first_rank():
            logger.warning(
                "%s runs one sequence at a time, which is slower than packed rows, because in packed rows %s",
                type(model).__name__,
                found["reason"],
            )
    layout = get_row_layout(model)
    layout.has_noise = has_noise(model.config)
    layout.shares_prefixes = layout.share_prefixes != "false" and not found["unshared"]
    if found["unshared"] and not found["reason"] and _is_first_rank():
        name = type(model).__name__
        logger.info("%s computes common prefixes for each sequence, because %s", name, found["unshared"])
    return layout


def shard_matrices_checked(model: PreTrainedModel, group: dist.ProcessGroup) -> None:
    """Shards a model, of which every rank of `group` has a full copy, and checks the shards. Call it before
    an engine moves the model to a device. Raises UsageError if the model cannot be sharded, or if the shards
    compute different results."""
    check_planned(model, group.size())
    expected = _states_and_logits(model)
    shard_matrices(model, group)
    if problem := _difference(model, expected, group):
        raise refusal(model, group.size(), f"{problem}, so transformers' plan for its architecture is wrong")


def _difference(model: PreTrainedModel, expected: Sequence[Tensor], group: dist.ProcessGroup) -> str:
    """Returns how the shards' results differ from `expected`; "" if they do not."""
    try:
        found = _states_and_logits(model)
    except (torch.OutOfMemoryError, torch.AcceleratorError, dist.DistError):
        raise  # an error of the machine, not of the plan
    except RuntimeError as error:
        return f"the shards fail with {type(error).__name__}: {first_line(error)}"
    errors = torch.tensor([_error(*pair) for pair in zip(found, expected, strict=True)])
    errors = errors.nan_to_num(torch.inf).to(DEVICE_TYPE)
    dist.all_reduce(errors, dist.ReduceOp.MAX, group)
    for name, error in zip(("hidden states", "logits"), errors.tolist(), strict=False):
        if error > MAX_PARTS_ERROR:
            return f"the shards' {name} differ from those of the whole model (relative error {error:.2g})"
    return ""


@torch.no_grad()
def _states_and_logits(model: PreTrainedModel) -> list[Tensor]:
    """Returns the hidden states (L, H) of one sequence, and a language model's logits (L, V)."""
    head = model.get_output_embeddings()
    with transformers_attention(model), _computing_in_float32(model):
        hidden = alone(model, _probe(model).b.token_ids.to(DEVICE_TYPE)).float()
        return [hidden] if head is None else [hidden, head(hidden)]


@contextmanager
def _computing_in_float32(model: PreTrainedModel) -> Iterator[None]:
    """Makes each module compute in float32 on this process's device within the context. A module's weights
    are on the device only while it computes, because the model may be larger than the device's memory."""
    left: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}

    def bring(module: nn.Module, _: Any) -> None:
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        left[module] = [(tensor, tensor.data) for tensor in own]
        for tensor in own:
            dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
            tensor.data = tensor.data.to(DEVICE_TYPE, dtype)

    def leave(module: nn.Module, *_: Any) -> None:
        for tensor, data in left.pop(module):
            tensor.data = data

    hooks = [module.register_forward_pre_hook(bring) for module in model.modules()]
    hooks += [module.register_forward_hook(leave, always_call=True) for module in model.modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def read_one_by_one(model: PreTrainedModel) -> None:
    """Makes the model read one sequence at a time, with the attention that transformers chooses for it."""
    get_row_layout(model).packed = get_row_layout(model).shares_prefixes = False
    if model.config._attn_implementation == PACKED:
        _set_attention(model, "sdpa" if model._supports_sdpa else "eager")


def _run_checks(run: Callable, model: PreTrainedModel) -> dict[str, str]:
    """Returns `reason`, why rows may not hold several sequences, `unshared`, why common prefixes are not read
    once, `error`, why the model cannot be trained (each "" where there is none), and the `flag` and `value`
    behind the error."""
    name, layout = type(model).__name__, get_row_layout(model)
    reason = (
        why_not_packed(run, model) if layout.packed else "its attention does not know where sequences end"
    )
    flag = value = error = unshared = ""
    if layout.share_prefixes != "false":
        unshared = reason or why_not_shared(run, model)
    if reason and layout.flag not in ("auto", PACKED):
        flag, value = "--ds.attn_implementation", layout.flag
        error = f"{name} cannot read packed rows with it: {reason}.\nUse auto."
    elif layout.sharing and (problem := reason or why_slices_differ(run, model, layout.sharing)):
        flag, value = "--ds.ring_attn_size", str(layout.sharing.size)
        error = f"{name} does not support sequence parallelism: {problem}.\nRemove the flag."
    elif problem := why_not_at_all(run, model):
        error = f"{name} cannot be trained: {problem}."
    elif layout.liger and (problem := why_not_liger(run, model)):
        flag, error = "--ds.use_liger_kernel", f"{problem}.\nRemove the flag."
    elif layout.replay and (problem := why_not_replayed(run, model, layout.replay)):
        flag, error = "--algo.router_replay", f"{problem}.\nRemove the flag."
    elif layout.share_prefixes == "true" and unshared:
        flag, value = "--ds.share_prefixes", "true"
        error = f"{name} cannot compute common prefixes once: {unshared}.\nUse auto."
    return {"reason": reason, "unshared": unshared, "error": error, "flag": flag, "value": value}


def why_not_packed(run: Callable, model: PreTrainedModel) -> str:
    """Returns the reason why a row of two sequences is not computed correctly; "" if it is."""
    probe = _probe(model)
    start = probe.a.length
    changed = start + probe.place
    pairs = (probe.a, probe.b), (probe.other_a, probe.b), (probe.a, probe.other_b)
    rows = [_row(model, *pair) for pair in pairs]
    try:
        row, with_other_a, with_other_b = [run(lambda row=row: in_one_pass(model, row)) for row in rows]
    except (torch.OutOfMemoryError, dist.DistError):
        raise  # an error of the machine, not of the model
    except (CannotPack, TypeError, AttributeError, RuntimeError) as error:
        if broke_attention(error):
            error.add_note(BROKEN_ATTENTION)
            raise
        if isinstance(error, torch.AcceleratorError):
            raise
        # The architecture's own code does not support packed rows, for example because it computes with the
        # mask. A broken kernel of other layers also fails in `why_not_at_all`.
        return f"it fails with {type(error).__name__}: {first_line(error)}"
    effect = _change(row[changed + 1 :], with_other_b[changed + 1 :]) + torch.finfo(model.dtype).eps
    into_next = _change(row[start:], with_other_a[start:]) / effect
    if not into_next <= MAX_LEAK[model.dtype]:
        return f"a sequence changes the next one ({into_next:.2g} times the effect of a token of its own)"
    into_earlier = _error(row[:changed], with_other_b[:changed]) / effect
    if not into_earlier <= MAX_LEAK[model.dtype]:
        return f"a token changes earlier ones ({into_earlier:.2g} times its effect on later ones)"
    with transformers_attention(model):
        expected = [run(lambda s=s: _alone(model, s)) for s in (probe.a, probe.b)]
    error = max(
        _error(found, wanted) for found, wanted in zip((row[:start], row[start:]), expected, strict=True)
    )
    return _beyond_rounding(error, model, "its hidden states differ from those of each sequence alone")


def why_slices_differ(run: Callable, model: PreTrainedModel, sharing: SequenceParallel) -> str:
    """Returns the reason why sequence-parallel slices of a sequence are not computed correctly; "" if they
    are."""
    row = _row(model, _probe(model).a)
    expected = run(lambda: in_one_pass(model, row))
    found = run(lambda: sharing.gathered(in_one_pass(model, row, sharing)))[: len(expected)]
    start = -(-len(expected) // (2 * sharing.size))  # the first chunk sees nothing of the others
    error = _error(found[start:], expected[start:])
    return _beyond_rounding(error, model, "its hidden states differ from those of the whole row")


def why_not_shared(run: Callable, model: PreTrainedModel) -> str:
    """Returns why common prefixes of a row's sequences cannot be read once, "" where they can."""
    if model.config._attn_implementation != PACKED:
        return "only --ds.attn_implementation auto supports common prefixes"
    if has_states(model):
        return "some layers carry a state along the row"
    try:
        error = _error_of_sharing(run, model)
    except (torch.OutOfMemoryError, torch.AcceleratorError, dist.DistError):
        raise  # an error of the machine, not of the model
    except CannotPack as error:
        return str(error)
    except (TypeError, AttributeError, RuntimeError) as error:
        return f"it fails with {type(error).__name__}: {first_line(error)}"
    return _beyond_rounding(error, model, "its hidden states or gradients differ from those of whole rows")


def _error_of_sharing(run: Callable, model: PreTrainedModel) -> float:
    """Returns the relative error of hidden states, and of the gradient of the embeddings, of a row whose
    common prefixes are read once."""
    layout, probe = get_row_layout(model), _probe(model)
    row, tree = _related(model, LONGEST)
    sharing = layout.sharing
    expected = run(lambda: in_one_pass(model, row))[tree.places]
    found = run(
        lambda: (
            in_one_pass(model, row, None, tree)
            if sharing is None
            else sharing.gathered(in_one_pass(model, row, sharing, tree))
        )
    )
    branches = tree.places >= probe.a.length
    error = _error(found[: len(expected)][branches], expected[branches])
    if layout.gathers or sharing is not None:
        return error
    row, tree = _related(model, max(LENGTHS))
    index = torch.from_numpy(tree.index).to(row.token_ids.device)
    of_row, found = (run(lambda x=x: _gradient(model, row, x, index)) for x in (None, tree))
    expected = torch.zeros_like(found).index_add(0, index, of_row)
    common = (index.bincount() > 1) & expected.any(-1)  # patches are no embeddings
    return max(error, _error(found[common], expected[common]))


def _related(model: PreTrainedModel, longest: int) -> tuple[PackedRow, PrefixTree]:
    """Returns a row of sequences that begin like others, and its tree: a branch of a branch, a beginning of
    another sequence, and equal ones. If the model reads images, they follow the same image, and the first one
    also another image. `longest`: largest number of tokens of a sequence without its image.

    Raises CannotPack if sequences with images have no tree."""
    probe, reader = _probe(model), get_row_layout(model).images
    image, other = (None, None) if reader is None else map(reader.noise, SHAPES)
    x, y = (
        sample.token_ids[0 if before is None else before.length :][:longest]
        for sample, before in ((probe.a, image), (probe.b, other))
    )
    half, most = len(x) // 2, len(x) * 3 // 4
    branch = torch.cat([x[:half], y])[: len(x)]
    twig = torch.cat([branch[:most], x])[: len(x)]
    sequences = (x, branch, twig, x[:most], branch)
    if reader is None or image is None or other is None:
        row = _row(model, *(Sample(token_ids=t, action_mask=torch.zeros_like(t).bool()) for t in sequences))
        return row, not_none(build_tree(row, with_routing=False))
    row = _row(model, *(_after_image(image, ids) for ids in sequences), _after_image(other, x))
    tree = build_tree(row, with_routing=False, patch_id=reader.patch_id)
    if tree is None:
        raise CannotPack("the patches of an image are not consecutive tokens")
    return row, tree


def _gradient(model: PreTrainedModel, row: PackedRow, tree: PrefixTree | None, index: Tensor) -> Tensor:
    """Returns the gradient of a random sum of the row's hidden states with respect to the embeddings of the
    tokens that are read, in float32."""
    embedded: list[Tensor] = []

    def detach(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1].clone()  # CTRL scales it in place

    hook = model.get_input_embeddings().register_forward_hook(detach)
    try:
        with torch.enable_grad():
            hidden = in_one_pass(model, row, tree=tree)
            hidden = hidden if tree is None else hidden[index]
            random = torch.Generator().manual_seed(1)
            weights = torch.randn(hidden.shape, generator=random).to(hidden.device)
            (gradient,) = torch.autograd.grad((hidden.float() * weights).sum(), embedded[0])
    finally:
        hook.remove()
    return gradient[0].float()


def why_not_at_all(run: Callable, model: PreTrainedModel) -> str:
    """Returns the reason why the model is not computed correctly even one sequence at a time; "" if it is."""
    probe = _probe(model)
    with transformers_attention(model):
        hidden, with_other_b = (run(lambda s=s: _alone(model, s)) for s in (probe.b, probe.other_b))
        effect = _change(hidden[probe.place + 1 :], with_other_b[probe.place + 1 :])
        into_earlier = _error(hidden[: probe.place], with_other_b[: probe.place])
        if not into_earlier <= MAX_LEAK[model.dtype] * effect + torch.finfo(model.dtype).eps:
            return "its predictions depend on later tokens, so it is no causal language model"
        if model.get_output_embeddings() is None:  # a sequence classifier
            return ""
        error = float(run(lambda: _head_error(model, hidden, probe.b)))
    if not error <= MAX_HEAD_ERROR[model.dtype]:
        return (
            f"its logits are no linear layer of its last hidden states (log-probs differ by {error:.2g} nats)"
        )
    return ""


def why_not_liger(run: Callable, model: PreTrainedModel) -> str:
    """Returns how Liger's kernels change the results beyond rounding; "" if they do not."""
    b = _probe(model).b
    with transformers_attention(model):
        found = run(lambda: _alone(model, b))
        with transformers_kernels(model):
            expected = run(lambda: _alone(model, b))
    change = f"Liger's kernels change the hidden states of {type(model).__name__}"
    return _beyond_rounding(_error(found, expected), model, change)


def why_not_replayed(run: Callable, model: PreTrainedModel, replay: Replay) -> str:
    """Returns the reason why the routers' choices cannot be replayed; "" if they can."""
    if not replay.choices:
        return f"no layer of {type(model).__name__} has a router"
    b = _probe(model).b
    nothing_known = torch.zeros(b.length, *replay.shape, dtype=torch.uint8)
    nothing_known += own_choice(nothing_known)
    device = next(model.parameters()).device
    with transformers_attention(model):
        try:
            run(lambda: alone(model, b.token_ids.to(device), b.images, nothing_known.to(device)))
        except NotReplayed as error:
            return str(error)
    return ""


@contextmanager
def transformers_attention(model: PreTrainedModel) -> Iterator[None]:
    """Switches the model to transformers' eager attention, with full masks, within the context."""
    own = model.config._attn_implementation
    if own is None or not model._can_set_attn_implementation():
        yield
        return
    _set_attention(model, "eager")
    try:
        yield
    finally:
        _set_attention(model, own)


def _set_attention(model: PreTrainedModel, name: str) -> None:
    model.set_attn_implementation(of_text(name, model.config))


class _Probe(NamedTuple):
    """The sequences of the checks. If the model reads images, each begins with an image, whose size differs
    between a and b."""

    a: Sample
    b: Sample
    other_a: Sample
    other_b: Sample
    """`b` with another token at `place`."""
    place: int


def _probe(model: PreTrainedModel) -> _Probe:
    config = model.config.get_text_config()
    facts = config.to_dict()
    named = model.config.to_dict() | facts
    special = {
        value
        for name, value in named.items()
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int)
    }
    words = torch.tensor([i for i in range(min(config.vocab_size, 1024)) if i not in special])
    windows = [
        value
        for name, value in facts.items()
        if ("window" in name or "chunk" in name) and isinstance(value, int) and 1 < value < LONGEST
    ]
    of_a = max(LENGTHS[0], min(2 * min(windows, default=0), LONGEST))
    limit = getattr(config, "max_position_embeddings", None) or 0
    lengths = [min(length, limit) if limit > 0 else length for length in (of_a, LENGTHS[1])]
    random = torch.Generator().manual_seed(0)
    places = [torch.randint(len(words), (length,), generator=random) for length in lengths]
    a, b = (words[place] for place in places)
    other_a, other_b, place = words[(places[0] + 1) % len(words)], b.clone(), lengths[1] // 2
    other_b[place] = words[(places[1][place] + 1) % len(words)]
    reader = get_row_layout(model).images
    nothing = Sample(token_ids=a[:0], action_mask=a[:0].bool())
    before_a, before_b = map(reader.noise, SHAPES) if reader else (nothing, nothing)
    return _Probe(
        a=_after_image(before_a, a),
        b=_after_image(before_b, b),
        other_a=_after_image(before_a, other_a),
        other_b=_after_image(before_b, other_b),
        place=before_b.length + place,
    )


def _after_image(image: Sample, token_ids: Tensor) -> Sample:
    whole = torch.cat([image.token_ids, token_ids])
    return Sample(token_ids=whole, action_mask=torch.zeros_like(whole).bool(), images=image.images)


def _row(model: PreTrainedModel, *sequences: Sample) -> PackedRow:
    return PackedRow.of(sequences).to(next(model.parameters()).device)


def _alone(model: PreTrainedModel, sample: Sample) -> Tensor:
    return alone(model, sample.token_ids.to(next(model.parameters()).device), sample.images)


def _change(before: Tensor, after: Tensor) -> float:
    """Returns the relative difference of hidden states (L, H), as the mean over tokens."""
    return float(_differences(before, after).mean())


def _error(found: Tensor, expected: Tensor) -> float:
    """Returns the relative difference of hidden states (L, H), as the median over tokens, because in half
    precision a few tokens may be routed to other experts."""
    return float(_differences(found, expected).median())


def _beyond_rounding(error: float, model: PreTrainedModel, difference: str) -> str:
    """Returns the description of a difference, with its relative error; "" if rounding explains it."""
    return "" if error <= MAX_ERROR[model.dtype] else f"{difference} (relative error {error:.2g})"


def _differences(x: Tensor, y: Tensor) -> Tensor:
    x, y = x.float(), y.float()
    return (x - y).norm(dim=-1) / y.norm(dim=-1).clamp_min(1e-20)


def _head_error(model: PreTrainedModel, hidden: Tensor, sample: Sample) -> Tensor:
    """Returns the mean difference in nats, (), between log-probs as models/policy.py computes them and those
    of the model's own logits."""
    ours = transformed_logits(get_head(model)(hidden).float(), model.config)
    inputs = inputs_alone(model, sample.token_ids.to(hidden.device), sample.images)
    own = model(**inputs, use_cache=False).logits[0].float()
    next_ids = inputs["input_ids"][0, 1:, None]
    log_probs = [logits[:-1].log_softmax(-1).gather(1, next_ids) for logits in (ours, own)]
    return (log_probs[0] - log_probs[1]).abs().mean()


def _through(ask: Callable[[], Any], module: RowModel) -> Callable:
    """Returns a function that runs a computation, which returns a tensor, as the forward pass of `module`
    through its engine, so that ZeRO-3's hooks apply."""

    def run(question: Callable[[], Tensor]) -> Tensor:
        module.forward = question
        try:
            return ask()
        finally:
            del module.forward

    return run


@contextmanager
def _evaluating(module: RowModel) -> Iterator[None]:
    was_training = module.training
    module.eval()
    yield
    module.train(was_training)


def _agreed(value: Any) -> Any:
    """Returns rank 0's value on every rank."""
    if not dist.is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def _is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _cache_entry(model: PreTrainedModel, zero_stage: int | None, tensor: int) -> Path:
    """Returns the cache file of the checks' result. Its name depends on everything on which the result
    depends."""
    code = [path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.py"))]
    parts = {
        "class": f"{type(model).__module__}.{type(model).__name__}",
        "config": {k: str(v) for k, v in sorted(model.config.to_dict().items()) if k != "_name_or_path"},
        "attention": [
            get_row_layout(model).flag,
            get_row_layout(model).packed,
            model.config._attn_implementation,
        ],
        "run": [str(model.dtype), next(model.parameters()).device.type, compute_capability()],
        "ranks": {"zero_stage": zero_stage, "tensor": tensor},
        "versions": [version("torch"), version("transformers"), digest(code)],
        "state kernels": [name for name in STATE_KERNELS if find_spec(name)],
        "liger": version("liger-kernel") if get_row_layout(model).liger else None,
        "images": get_row_layout(model).images is not None,
        "replay": get_row_layout(model).replay is not None,
        "sharing": [sharing.size, sharing.mode] if (sharing := get_row_layout(model).sharing) else None,
        "prefixes": get_row_layout(model).share_prefixes,
    }
    return cache_folder() / "packing" / f"{digest(parts)}.json"


def _keep(entry: Path, found: dict[str, str]) -> None:
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(entry, [json.dumps(found)], shared=True)
    except OSError as error:
        logger.warning("the result of the self-check was not cached: %s", error)
