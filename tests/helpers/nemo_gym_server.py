"""Small stand-in for the servers of NeMo Gym, with their protocol: the agent's `/run` seeds a session, asks
the model server's `/v1/responses`, which asks the policy's `/v1/chat/completions`, and verifies the
answer."""

import asyncio
import json
import re
import sys
from typing import Any

import aiohttp
from aiohttp import web

TOKENS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")


class NemoGym:
    """Server that asks for a sum, up to `max_turns` times. `seen`: what the policy's server answered."""

    def __init__(self, policy: str, max_turns: int = 2) -> None:
        self.policy, self.max_turns = policy, max_turns
        self.seen: list[dict] = []
        self.sessions = 0

    async def start(self, port: int = 0) -> str:
        app = web.Application()
        app.router.add_post("/run", self.run)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def run(self, request: web.Request) -> web.Response:
        row = await request.json()
        self.sessions += 1
        params = row["responses_create_params"]
        given, output, response = list(params["input"]), [], {}
        for _ in range(self.max_turns):
            status, response = await self.responses({**params, "input": [*given, *output]})
            if status != 200:
                return web.json_response(response, status=500)
            output += response["output"]
            if self.is_right(row, output) or response["incomplete_details"]:
                break
            output.append({"type": "message", "role": "user", "content": "Wrong. Again!"})
        answer = {**row, "response": {**response, "output": output}}
        return web.json_response(answer | {"reward": float(self.is_right(row, output)), "asked": len(output)})

    def is_right(self, row: dict, output: list[dict]) -> bool:
        said = [item["content"][0]["text"] for item in output if item["role"] == "assistant"]
        return re.findall(r"\d+", said[-1])[-1:] == [row["expected_answer"]]

    async def responses(self, params: dict) -> tuple[int, dict]:
        """Answers as the model server does, with return_token_id_information."""
        body = {"model": "policy", "messages": list(map(self.message, params["input"])), "logprobs": True}
        body |= {"metadata": params["metadata"], "return_tokens_as_token_ids": True, "top_logprobs": 0}
        body = json.loads(params["metadata"].get("extra_body", "{}")) | body
        async with (
            aiohttp.ClientSession() as client,
            client.post(f"{self.policy}/chat/completions", json=body) as response,
        ):
            answer = await response.json()
        if response.status == 400 and "context length" in json.dumps(answer):
            answer = {"choices": [{"message": {"content": ""}, "finish_reason": "length"}]}
        elif response.status != 200:
            return response.status, answer
        return 200, self.response(answer)

    def message(self, item: dict) -> dict:
        if item["role"] != "assistant":
            return {"role": item["role"], "content": item["content"]}
        tokens = {name: item[name] for name in TOKENS if name in item}
        return {"role": "assistant", "content": item["content"][0]["text"], "tool_calls": [], **tokens}

    def response(self, answer: dict) -> dict:
        choice = answer["choices"][0]
        text = {"type": "output_text", "text": choice["message"]["content"], "annotations": []}
        item: dict[str, Any] = {"type": "message", "role": "assistant", "content": [text]}
        if "token_ids" in choice:
            self.seen.append(answer)
            rows = choice["logprobs"]["content"]
            assert [row["token"] for row in rows] == [f"token_id:{i}" for i in choice["token_ids"]]
            numbers = [row["logprob"] for row in rows]
            item |= dict(zip(TOKENS, (answer["prompt_token_ids"], choice["token_ids"], numbers), strict=True))
        cut = choice["finish_reason"] == "length"
        return {"output": [item], "incomplete_details": {"reason": "max_output_tokens"} if cut else None}


def row(number: int) -> dict:
    a, b = number % 9 + 1, number // 9 % 9 + 1
    return {
        "responses_create_params": {"input": [{"role": "user", "content": f"{a} + {b} = ?"}]},
        "expected_answer": str(a + b),
        "agent_ref": {"type": "responses_api_agents", "name": "simple_agent"},
    }


async def serve(policy: str, port: int) -> None:
    print(await NemoGym(policy).start(port), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2])))
