"""Log-probs that vLLM alone gives the tokens of a text with an exported model."""

from vllm import LLM, SamplingParams


def main(spec: dict) -> list[list[float]]:
    llm = LLM(
        spec["model"], dtype=spec["dtype"], max_model_len=256, enforce_eager=True, kv_cache_memory_bytes=2**26
    )
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    found = []
    for token_ids in spec["texts"]:
        (output,) = llm.generate({"prompt_token_ids": token_ids}, params, use_tqdm=False)
        log_probs = zip(token_ids[1:], output.prompt_logprobs[1:], strict=True)
        found.append([of_token[token].logprob for token, of_token in log_probs])
    return found
