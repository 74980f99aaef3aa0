"""Compiler that Triton looks for in a backend. Interpreted kernels never call it."""

from typing import Any

from triton.backends.compiler import BaseBackend


class NoCompiler(BaseBackend):
    @staticmethod
    def supports_target(target: Any) -> bool:
        return False

    def hash(self) -> str:
        return ""

    def parse_options(self, options: dict) -> object:
        raise NotImplementedError

    def add_stages(self, stages: dict, options: object, language: Any) -> None:
        raise NotImplementedError

    def load_dialects(self, context: Any) -> None:
        raise NotImplementedError

    def get_module_map(self) -> dict:
        raise NotImplementedError
