"""Contract of engines for vLLM's. One engine serves all checks; the check of new weights comes last."""

import asyncio
import json
import sys
from pathlib import Path

from engine_contract import CHECKS, Setting, with_engine


async def all_checks(setting: Setting) -> None:
    for check in CHECKS:
        print(check.__name__, flush=True)
        await check(setting)


if __name__ == "__main__":
    spec = json.loads(sys.argv[1])
    asyncio.run(with_engine("vllm", spec["model"], all_checks))
    (Path(spec["out"]) / "rank0.json").write_text(json.dumps([check.__name__ for check in CHECKS]))
