"""`openrlhf explain`: every code and every known message has its explanation, and is found by its text."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from refusals import printed

from openrlhf.cli import main
from openrlhf.errors import ErrorCode
from openrlhf.tasks.tiny_model import tiny_chat_model
from openrlhf.tools.doctor.codes import CODES, meanings
from openrlhf.tools.doctor.explain import explain
from openrlhf.tools.doctor.messages import MESSAGES, find_messages

QUICK = [code for code, about in CODES.items() if about.files is not None]
LOG = """\
INFO 11-02 09:30:02 [core.py:58] Initializing a V1 LLM engine
ERROR 11-02 09:30:44 [core.py:396] ValueError: No available memory for the cache blocks.
RuntimeError: Engine core initialization failed. See root cause above.
error: the vLLM engine did not start: RuntimeError: Engine core initialization failed. [engine-failed]
"""


def test_every_code_has_a_meaning_and_an_explanation() -> None:
    assert list(CODES) == list(meanings()) == list(ErrorCode)
    for about in CODES.values():
        assert about.causes.endswith(".") and about.remedy.endswith(".")
        assert about.command and about.message


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chat_model(tmp_path_factory.mktemp("models") / "model")


@pytest.mark.parametrize("code", QUICK)
def test_an_example_ends_with_the_message_that_it_shows(code, model, tmp_path, monkeypatch, capsys) -> None:
    example = CODES[code]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setitem(sys.modules, "trackio", None)
    Path("model").symlink_to(model)
    for name, content in example.files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(content)
    program, *words = shlex.split(example.command)
    assert program == "openrlhf"
    with pytest.raises(SystemExit) as stop:
        main.main(words)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and example.message in err
    assert code in [error.code for error in printed(err)]


def test_there_are_messages_of_each_library() -> None:
    names = [name for _, name in MESSAGES]
    assert len(names) == len({*names} - {*ErrorCode}) >= 30
    wanted = {"CUDA", "NCCL", "Ray", "vLLM", "DeepSpeed", "transformers", "torch", "system"}
    assert {source for source, _ in MESSAGES} == wanted


@pytest.mark.parametrize("key", MESSAGES, ids=lambda key: key[1])
def test_a_message_is_found_by_its_text(key) -> None:
    """The first message that is found is the one of the text, also if a log breaks its lines otherwise."""
    sample = MESSAGES[key].sample
    assert next(find_messages(f"Traceback ...\n{sample}\nmore")) == key
    others = [*find_messages(sample)][1:]
    assert len(others) <= 1, others


REPORTED = """\
out-of-memory: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 3; 79.35 GiB total capacity
out-of-memory: torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB
nccl-timeout: [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=216, OpType=ALLTOALL_BASE
actor-died: ray.exceptions.RayActorError: The actor died unexpectedly before finishing this task.
not-scheduled: Waiting for creating a placement group of specs for 150 seconds. specs=[{'GPU': 1.0}]
engine-core-failed: vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.
no-kv-cache: (3.50 GiB KV cache is needed, which is larger than the available KV cache memory (1.20 GiB).
gated-model: huggingface_hub.errors.GatedRepoError: 401 Client Error.
peer-gone: RuntimeError: [Rank 0] connect() failed: Connection reset by peer
port-in-use: OSError: [Errno 98] error while attempting to bind on address: Address already in use
no-flash-attention: ImportError: flash_attn_2_cuda.so: undefined symbol: _ZN3c104cuda9SetDeviceEi
dtype-mismatch: RuntimeError: expected scalar type Half but found Float
shared-memory: DataLoader worker (pid 17) is killed by signal: Bus error. insufficient shared memory (shm)
killed: [launch.py:322:sigkill_handler] [rank 3] exits with return code = -9
"""
"""Messages as users reported them, of other versions and ranks than the samples, each behind its name."""


@pytest.mark.parametrize("line", REPORTED.splitlines(), ids=lambda line: line.partition(":")[0])
def test_reported_messages_are_found(line: str) -> None:
    name, _, text = line.partition(": ")
    assert name in [known for _, known in find_messages(text)]


@pytest.mark.parametrize("text", ["step 3 of 10: loss 0.4", "the run has ended", "", "CUDA 13.0 on 8 GPUs"])
def test_a_healthy_line_is_no_error(text: str) -> None:
    assert [*find_messages(text)] == []


def test_flags_and_pages_of_remedies_exist() -> None:
    root = Path(__file__).parents[4]
    known = (root / "docs" / "flags.md").read_text()
    of_others = {
        *("--gpus", "--local-dir", "--master_port", "--nnodes", "--nproc_per_node", "--num-gpus", "--port"),
        *("--help", "--print_plan", "--report", "--runtime-env-json", "--shm-size", "--temp-dir", "--config"),
    }
    texts = [*(about.causes + about.remedy for about in CODES.values())]
    texts += [message.meaning + message.remedy for message in MESSAGES.values()]
    for text in texts:
        assert {
            flag for flag in re.findall(r"--[a-z][\w.-]*\w", text) if f"`{flag}`" not in known
        } <= of_others
        assert all((root / page).exists() for page in re.findall(r"docs/\w+\.md", text))


def test_a_code_is_explained(capsys) -> None:
    assert explain(["missing-column"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("missing-column: A dataset has no column of this name.\n")
    assert "--data.input_key" in out and "Its columns: question, answer" in out


def test_a_log_is_explained(tmp_path, capsys) -> None:
    """Its own code first, then what is known of the libraries."""
    (tmp_path / "worker.err").write_text(LOG)
    explain([str(tmp_path / "worker.err")])
    titles = re.findall(r"^([a-z-]+): ", capsys.readouterr().out, re.MULTILINE)
    assert titles == ["engine-failed", "no-kv-cache", "engine-core-failed"]
    explain(LOG.split())
    assert "no-kv-cache: " in capsys.readouterr().out


def test_without_an_error_all_names_are_listed(capsys) -> None:
    explain([])
    out = capsys.readouterr().out
    assert all(
        re.search(rf"^  {name} ", out, re.MULTILINE) for name in [*CODES, *(name for _, name in MESSAGES)]
    )


def test_what_is_not_known_is_refused(capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        main.main(["explain", "missing-colum"])
    (error,) = printed(capsys.readouterr().err)
    assert stop.value.code == 2 and error.code is ErrorCode.NOT_FOUND
    assert "missing-column" in error.text


def test_it_imports_nothing_large_and_reads_stdin() -> None:
    program = (
        "import sys; from openrlhf.cli.main import main\n"
        "try: main(['explain', '-'])\n"
        "except SystemExit as stop: code = stop.code\n"
        "large = {'torch', 'transformers', 'ray', 'vllm', 'deepspeed', 'datasets', 'numpy'}\n"
        "print(sorted(large & sys.modules.keys()), code)"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, input=LOG, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("engine-failed: ") and done.stdout.endswith("[] 0\n")
