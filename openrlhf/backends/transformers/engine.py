"""A rollout engine that samples with transformers: requests whose prompts are equally long share a batch.

It is for machines without vLLM, for loops in one process, and for tests of code that uses rollout engines.
"""

import asyncio
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from openrlhf.backends.peak_memory import Peaks
from openrlhf.backends.rollout import EngineOptions, find_nuclei, likely_tokens
from openrlhf.backends.weight_sync.buckets import Bucket, parse_metas
from openrlhf.backends.weight_sync.checksum import Checksum
from openrlhf.backends.weight_sync.stored_weights import EngineProbe, WeightFingerprint, fingerprints
from openrlhf.completions import Completion, Completions, SamplingParams
from openrlhf.errors import ErrorCode, UsageError
from openrlhf.models.checkpoint_layout import CheckpointLayout, checkpoint_tensors
from openrlhf.models.generation import Generated, generate
from openrlhf.models.loading import load_generator
from openrlhf.models.tokenizers import load_tokenizer
from openrlhf.text import decode
from openrlhf.types import not_none

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

FLAG = "--actor.model_name_or_path"

UNKNOWN = {
    *("presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids", "bad_words"),
    *("min_tokens", "prompt_logprobs"),
}
"""Sampling parameters that this engine does not support."""
GATHER = 0.005
"""Seconds in which further requests join the first one of a batch: those of a step arrive together."""
LARGEST_BATCH = 64
PLAIN = vars(SamplingParams())
"""Default sampling parameters."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Request:
    """An answer that is waited for."""

    prompt: list[int]
    params: SamplingParams
    """With a seed of its own, and as many tokens as there is room for."""
    answer: "asyncio.Future[Completion]"

    def shares(self, other: "_Request") -> bool:
        """Tells whether both can be answered in one batch without padding."""
        alike = replace(self.params, seed=None, max_tokens=0) == replace(
            other.params, seed=None, max_tokens=0
        )
        return alike and len(self.prompt) == len(other.prompt) and not self.params.stop


class TransformersEngine:
    """A rollout engine around a transformers model. It loads the weights from the model's files, and receives
    weight syncs through the control plane (`ray`)."""

    def __init__(self, options: EngineOptions) -> None:
        """Raises UsageError for options that this engine does not support."""
        asked = {
            "several workers for one model": options.num_workers > 1,
            f"weight syncs by {options.transfer_backend} (only ray)": options.transfer_backend != "ray",
            "images": options.max_images > 0,
            "adapters that are not merged": options.lora is not None,
            "the routing of experts": options.returns_routing,
        }
        if missing := [name for name, is_asked in asked.items() if is_asked]:
            raise _unsupported(missing)
        self.options, self.version = options, 0
        self.device = "cuda" if options.on_gpu else "cpu"
        self.turn = asyncio.Lock()
        """Lock of the model, held during a batch of requests, a probe or a weight update."""
        self.waiting: list[_Request] = []
        self.serving: asyncio.Task[None] | None = None
        """Task that answers the waiting requests; None before the first one."""
        self.num_tokens, self.num_running, self.num_requests = 0, 0, 0
        """Number of sampled tokens; of requests that are being answered; of those and the waiting ones."""
        self.received: dict[str, Tensor] = {}
        self.checksum = Checksum()
        self.unwritten: set[str] | None = None
        """Parameters that no weight update has written; None before the first update."""

    @staticmethod
    def environment(options: EngineOptions) -> dict[str, str]:
        return {} if options.on_gpu else {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}

    async def start(self, free_fraction: float | None = None) -> None:
        """Loads the model and its tokenizer. `free_fraction` is ignored, because memory is allocated on
        demand."""
        path = self.options.model
        model: Any = load_generator(
            path, flag=FLAG, dtype=self.options.dtype, attention="auto", max_len=self.options.max_len
        )
        self.model = model.to(self.device).eval()
        self.tokenizer = load_tokenizer(path, flag=FLAG)

    def shutdown(self) -> None:
        del self.model

    @property
    def vocabulary(self) -> int:
        return self.model.config.get_text_config().vocab_size

    async def generate(
        self,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        multi_modal_data: dict | None = None,
    ) -> Completions:
        """Answers one request. A cancelled one stops at its next token, unless others of its batch go on.
        Raises UsageError for parameters that this engine does not support, and for prompts as long as
        `max_len`."""
        length, params = len(prompt_token_ids), vars(sampling_params).items()
        known = PLAIN.keys() - UNKNOWN
        given = [name for name, value in params if name not in known and value != PLAIN.get(name)]
        if given := [*given, *(multi_modal_data or ())]:
            raise _unsupported(given)
        if (room := self.options.max_len - length) < 1:
            text = (
                f"a prompt of {length} tokens leaves no room for an answer in {self.options.max_len} tokens"
            )
            raise UsageError(ErrorCode.TOO_LONG, text)
        seed = secrets.randbits(62) if sampling_params.seed is None else sampling_params.seed
        most, loop = min(room, sampling_params.max_tokens or room), asyncio.get_running_loop()
        asked = [
            _Request(
                prompt=list(prompt_token_ids),
                params=replace(sampling_params, seed=seed + i, max_tokens=most, n=1),
                answer=loop.create_future(),
            )
            for i in range(sampling_params.n)
        ]
        self.waiting += asked
        self.num_requests += 1
        if self.serving is None or self.serving.done():
            self.serving = asyncio.create_task(self._serve())
        try:
            answers = await asyncio.gather(*(request.answer for request in asked))
        finally:
            self.num_requests -= 1
        outputs = [replace(answer, index=i) for i, answer in enumerate(answers)]
        return Completions(prompt_token_ids=list(prompt_token_ids), outputs=outputs)

    async def _serve(self) -> None:
        """Answers the waiting requests, batch by batch. Cancelled ones are left out, and end a batch if no
        other request is in it."""
        await asyncio.sleep(GATHER)
        while self.waiting:
            async with self.turn:
                batch = self._next_batch()
                self.num_running = len(batch)
                try:
                    answers = await asyncio.to_thread(self._answers, batch) if batch else []
                except Exception as error:
                    for request in batch:
                        if not request.answer.done():
                            request.answer.set_exception(error)
                else:
                    for request, answer in zip(batch, answers, strict=True):
                        if not request.answer.done():
                            request.answer.set_result(answer)
                finally:
                    self.num_running = 0

    def _next_batch(self) -> list[_Request]:
        waiting = [request for request in self.waiting if not request.answer.done()]
        first = waiting[:1]
        alike = [r for r in waiting[1:] if r.shares(waiting[0])][: LARGEST_BATCH - 1]
        batch = [*first, *alike]
        self.waiting = [request for request in waiting if request not in batch]
        return batch

    def progress(self) -> tuple[int, bool]:
        return self.num_tokens, self.num_running > 0

    def queue(self) -> tuple[int, int]:
        running = self.num_running
        return running, max(0, self.num_requests - running)

    def _answers(self, batch: Sequence[_Request]) -> list[Completion]:
        prompt, params = batch[0].prompt, batch[0].params
        ids: list[int] = []
        stops = [params.stop] if isinstance(params.stop, str) else params.stop or []
        own = self.model.config.get_text_config().eos_token_id
        eos = [] if params.ignore_eos else [own] if isinstance(own, int) else own or ()
        count = self.vocabulary if params.logprobs == -1 else params.logprobs

        def sampled(token: int) -> None:
            ids.append(token)
            self.num_tokens += len(batch)

        def stop() -> bool:
            return all(request.answer.cancelled() for request in batch) or any(
                stop in self._text(prompt, ids, params) for stop in stops
            )

        generated = generate(
            self.model,
            [request.prompt for request in batch],
            [not_none(request.params.seed) for request in batch],
            replace(
                params,
                max_tokens=max(not_none(request.params.max_tokens) for request in batch),
                stop_token_ids=[*(params.stop_token_ids or ()), *eos],
            ),
            pad_token_id=0,  # unused: equally long prompts need no padding
            on_token=sampled,
            stop=stop,
            likely=max(count or 0, params.max_kept_tokens, params.num_likely) or count,
        )
        return [self._completion(r, answer, stops) for r, answer in zip(batch, generated, strict=True)]

    def _text(self, prompt: list[int], ids: list[int], params: SamplingParams) -> str:
        return decode(self.tokenizer, ids, after=prompt, skip_special_tokens=params.skip_special_tokens)

    def _completion(self, request: _Request, answer: Generated, stops: Sequence[str]) -> Completion:
        params = request.params
        ids, likely = answer.token_ids[: params.max_tokens], answer.likely
        if likely is not None:
            likely = likely[: len(ids)]
        is_cut = len(ids) < len(answer.token_ids)
        whole = self._text(request.prompt, ids, params) if params.detokenize else ""
        sets = tokens = None
        if (params.max_kept_tokens or params.num_likely) and likely is not None:
            rows = likely.ids.int().cpu().numpy(), likely.log_probs.cpu().numpy()
            sets = find_nuclei(*rows) if params.max_kept_tokens else None
            tokens = likely_tokens(*rows, params.num_likely) if params.num_likely else None
        ends = [(place, place + len(stop)) for stop in stops if (place := whole.find(stop)) >= 0]
        return Completion(
            index=0,
            token_ids=ids,
            text=whole[: min(ends)[params.include_stop_str_in_output]] if ends else whole,
            finish_reason="stop" if ends else "length" if is_cut else answer.finish_reason,
            logprobs=likely,
            log_probs=None if likely is None else likely.log_probs[:, 0].cpu().numpy(),
            versions=np.array([[self.version, len(ids)]], np.int32),
            kept=sets,
            likely=tokens,
        )

    async def probe(self, token_ids: list[int], pictures: "Sequence[Picture]" = ()) -> EngineProbe:
        async with self.turn:
            ids = torch.tensor(token_ids, device=self.device)
            with torch.inference_mode():
                log_probs = self.model(ids[None]).logits[0, :-1].float().log_softmax(-1)
            return EngineProbe(
                log_probs=log_probs.gather(1, ids[1:, None])[:, 0].tolist(), version=self.version
            )

    async def init_weight_transfer_engine(self, init_info: dict) -> None:
        return

    async def start_weight_update(self) -> None:
        await self.turn.acquire()  # bounded: requests end
        self.received, self.checksum = {}, Checksum()

    async def update_weights(self, update_info: dict | list[dict]) -> None:
        for update in update_info if isinstance(update_info, list) else [update_info]:
            buffer = torch.frombuffer(bytearray(update["data"]), dtype=torch.uint8)
            for meta, tensor in Bucket(tuple(parse_metas(update["tensors"]))).views(buffer):
                self.checksum.add(meta.name, tensor)
                self.received[meta.name] = tensor

    async def finish_weight_update(self, weight_version: str) -> None:
        """Loads the received weights the way transformers loads a checkpoint, and releases the lock."""
        made, info = type(self.model).from_pretrained(
            None,
            config=self.model.config,
            state_dict=self.received,
            dtype=self.model.dtype,
            output_loading_info=True,
        )
        missing = set(info["missing_keys"])
        came = {name: tensor for name, tensor in made.state_dict().items() if name not in missing}
        self.model.load_state_dict(came, strict=False)
        self.unwritten = missing if self.unwritten is None else self.unwritten & missing
        self.received, self.version = {}, int(weight_version)
        self.turn.release()

    async def loaded_checksums(self) -> list[int]:
        return [self.checksum.value]

    async def unwritten_parameters(self) -> list[str]:
        names = self.unwritten
        return sorted(names if names is not None else checkpoint_tensors(self.model))

    async def layer_fingerprints(self, lengths: dict[str, int]) -> dict[str, WeightFingerprint]:
        tensors = checkpoint_tensors(self.model)
        layout = CheckpointLayout(self.model, {name: tuple(t.shape) for name, t in tensors.items()})
        whole = {n: t for c in layout.conversions for n, t in layout.convert(c, tensors).items()}
        return fingerprints((name, whole[name]) for name in lengths if name in whole)

    async def peak_memory(self) -> Peaks:
        return {}

    async def sleep(self) -> None:
        async with self.turn:
            self.model.to("cpu")

    async def wake(self, tags: list[str]) -> None:
        if "weights" in tags:
            self.model.to(self.device)


def _unsupported(what: Sequence[str]) -> UsageError:
    text = f"the engine does not support {', '.join(what)}"
    return UsageError(ErrorCode.UNSUPPORTED, text, flag="--rollout.engine", value="transformers")
