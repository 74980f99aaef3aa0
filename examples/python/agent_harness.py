"""Agents that run Claude Code, and as `agent_harness.py:Codex` Codex, in a folder of their own. The policy
writes its answer to a file there, which is compared with the label.

--train.agent_func_path examples/python/agent_harness.py --data.label_key label

The harness executes what the policy writes, as the user of the run: run it in a container. Programs are found
in PATH, or in the packages claude-agent-sdk and openai-codex-cli-bin.
"""

import asyncio
import os
import shutil
import signal
import tempfile
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from openrlhf.agents.openai import OpenAIAgentExecutor

TASK = "{}\n\nWrite the result, a number alone, to answer.txt in this folder."
PACKAGED = {"claude": ("claude_agent_sdk", "_bundled/claude"), "codex": ("codex_cli_bin", "bin/codex")}


def find(program):
    """Returns the program's path. Raises FileNotFoundError."""
    package, place = PACKAGED[program]
    spec = find_spec(package)
    packaged = [str(Path(folder) / place) for folder in spec.submodule_search_locations or ()] if spec else []
    if found := next(filter(None, (shutil.which(path) for path in (program, *packaged))), None):
        return found
    raise FileNotFoundError(f"{program} is neither in PATH nor in the package {package}")


class AgentExecutor(OpenAIAgentExecutor):
    def __init__(self):
        super().__init__(tool_parser="hermes")

    def command(self, session, text):
        flags = ["--model", session.model, "--dangerously-skip-permissions"]
        return [find("claude"), "-p", text, *flags]

    def settings(self, session):
        """Returns environment variables of Claude Code."""
        return {
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(session.max_length),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(session.sampling_params.max_tokens or session.max_length),
            "API_TIMEOUT_MS": "3600000",  # for each answer
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "IS_SANDBOX": "1",  # lets root use --dangerously-skip-permissions
        }

    async def run_agent(self, prompt, label, session):
        with tempfile.TemporaryDirectory() as folder:
            # its own HOME: episodes share no settings, memories and sessions
            private = {"HOME": folder, "CODEX_HOME": folder}
            program = await asyncio.create_subprocess_exec(
                *self.command(session, TASK.format(prompt)),
                cwd=folder,
                env=os.environ | self.settings(session) | private | session.environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                status = await program.wait()
            finally:  # also when the episode is cancelled; whatever the harness started ends with it
                with suppress(ProcessLookupError):
                    os.killpg(program.pid, signal.SIGKILL)
            answer = Path(folder, "answer.txt")
            right = answer.is_file() and answer.read_text(encoding="utf-8").strip() == str(label)
        return {
            "reward": float(right),
            "extra_logs": {"turns": session.num_turns, "failed": float(status != 0)},
        }


class Codex(AgentExecutor):
    def settings(self, session):
        return {}

    def command(self, session, text):
        provider = f'{{name="policy", base_url="{session.base_url}", env_key="OPENAI_API_KEY"}}'
        settings = {
            "model_provider": "policy",
            "model_providers.policy": provider,
            "model_context_window": session.max_length,
            "model_auto_compact_token_limit": session.max_length * 3 // 4,  # leaves room for the summary
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
        return [find("codex"), "exec", "-m", session.model, *options, *flags, text]
