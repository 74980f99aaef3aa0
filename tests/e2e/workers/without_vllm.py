"""The commands that sample, where vLLM cannot be imported. Argument: a JSON list of [module, flags]."""

import json
import sys
from importlib import import_module

sys.modules["vllm"] = None  # pyrefly: ignore[unsupported-operation]

if __name__ == "__main__":
    for module, flags in json.loads(sys.argv[1]):
        try:
            import_module(module).main(flags)
        except SystemExit as end:  # as `agent try` ends
            assert not end.code, f"{module} ended with {end.code}"
