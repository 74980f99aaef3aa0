"""Contract of engines for vLLM's. One engine serves all checks; the check of new weights comes last."""

from engine_contract import CHECKS, PASSED, Setting, with_engine


async def all_checks(setting: Setting) -> None:
    found = setting.engine.llm.vllm_config.scheduler_config
    assert (found.max_num_seqs, found.policy) == (PASSED["max_num_seqs"], PASSED["scheduling_policy"])
    for check in CHECKS:
        print(check.__name__, flush=True)
        await check(setting)


async def main(spec: dict) -> list[str]:
    await with_engine("vllm", spec["model"], all_checks)
    return [check.__name__ for check in CHECKS]
