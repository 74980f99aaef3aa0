"""Prints docs/api.md, the page of the public names: `python tools/api_page.py > docs/api.md`."""

import ast
import inspect
import sys
from dataclasses import fields, is_dataclass
from enum import Enum
from itertools import zip_longest
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import openrlhf
from openrlhf.api import PUBLIC

EXAMPLE = Path(__file__).parents[1] / "recipes" / "grpo.py"
HEAD = """\
# Loops of your own

`import openrlhf as rl` has a few verbs, with which a training loop is a program of yours: in one process, without
Ray, on a laptop or a GPU, or on a cluster. The flags are those of `openrlhf ppo`, with the same checks; a run leaves the same run
folder, report and checkpoints. `python tools/api_page.py > docs/api.md` writes this page.

This is GRPO, from [recipes/grpo.py](../recipes/grpo.py):

```python
{example}
```

Each verb returns a `Result` at once. `result()` waits for its value, `await` too, and other verbs take a result in
the place of the value. Sampling, rewards and evaluation work on one thread, the models on another, each in the order
of submission; `sync` waits for both. An error whose result nobody reads is raised by the first verb that is called after
it. `with` finishes the work, writes the report and frees the memory at the end; without it, call `run.close()`. A process
may have several runs.

Prompts come from `run.prompts`: a path, a name on the hub, a `datasets.Dataset`, or a list of rows, texts or
conversations, with the columns and the template of the flags `data.*`. `run.sample` also takes texts, as they are.

| recipe | what it shows |
|---|---|
| [grpo.py](../recipes/grpo.py) | the loop above |
| [sft.py](../recipes/sft.py) | supervised fine-tuning on a dataset's answers |
| [grpo_async.py](../recipes/grpo_async.py) | the engine samples while the models train |
| [ppo_with_critic.py](../recipes/ppo_with_critic.py) | values, generalized advantages, several passes over a batch |
| [best_of_n.py](../recipes/best_of_n.py) | a loss of your own: the policy imitates its best answers |
| [dpo_on_policy.py](../recipes/dpo_on_policy.py) | a loss of sequences: pairs of the policy's own answers |
| [curriculum.py](../recipes/curriculum.py) | a loop with a state, in its checkpoints |

## A loss of your own

`forward_backward` takes a function `(log_probs, batch) -> (loss, metrics)` of the whole batch; metrics may be left out.
`log_probs` (A,) are the policy's, one for each action, and gradients flow through them. The fields of the batch are NumPy
arrays: `torch.from_numpy(batch.advantages)`. The gradient of the loss with respect to the
log-probs goes to the model as weights of `sum(weight * log_prob)`, so the result does not depend on how rows are
packed. It costs one forward pass more than a loss by name.

A loss reads what the batch has ([fields](#batch)): sequence i has `batch.num_actions[i]` actions, so that
`log_probs.split(batch.num_actions.tolist())` are those of each sequence, and `batch.prompts` numbers the prompt of each
action. Rewards are those of your groups: `[t.reward for group in groups for t in group.trajectories]`, of which failed
and masked samples are not in the batch. Further batches with losses of their own add up:
`run.forward_backward(batch, None, (supervised, likelihood))`.

A batch may be trained on several times, and batches of earlier weights too: the ratio of the loss is that to the
log-probs which `run.batch` computed. `run.update` trains a critic as well; `forward_backward` and `optim_step` train the
policy alone.

## A reward of your own

`run.reward` calls a function `(queries, prompts, labels)` once, with a list of all samples for each argument. `queries`
are prompts with their answers, `labels` the `data.label_key` column as it is. The function returns one number for each
sample: a list, an array, a tensor, a generator; or a dict, see [rewards.md](rewards.md). It may be `async`, an object
with `__call__`, keep state, start processes. It runs in a thread, where `signal` does not work, and cannot call verbs of
its own run, which would wait for it. The text of an answer is `run.tokenizer.decode(sample.action_ids)`.

Agents, hooks, trackers and estimators are named by flags: `**{{"train.hooks": ["loop.py:Mine"]}}`, see
[extending.md](extending.md). A run imports that file: if it is your program, put its loop under
`if __name__ == "__main__":`.

## Checkpoints and signals

`run.state` is a dictionary of your own, with numbers, texts, lists, dicts, tensors and arrays: each checkpoint has it, and `run.load_state()` restores it with the models. With
`**{{"ckpt.save_steps": 10}}`, `run.log` saves after every tenth step, and SIGTERM or Ctrl-C ends the program after its step,
with a checkpoint and status 75, as they end `openrlhf ppo`.

A fork is a copy: `cp -r ckpt fork`, without the checkpoints `global_step*` after the one to begin at, and the same program
with `**{{"ckpt.path": "fork"}}` and other settings continues from there.

## Engines and backends

Unless a flag says otherwise, transformers samples and PyTorch alone trains: both start in seconds.
`**{{"rollout.engine": "vllm"}}` starts vLLM's engine, and `**{{"train.backend": "deepspeed"}}` trains with DeepSpeed,
which takes one `forward_backward` for each `optim_step`.

`rl.Run(..., placement="ray")` places engines and models as processes of a Ray cluster, as `openrlhf ppo` does, with its
flags and defaults: vLLM, DeepSpeed, several ranks, machines and engines. The loop stays as it is.

## Shapes

Fields below have one entry for each of A actions, tokens that the policy chose; B sequences; N tokens; E episodes; L
tokens and T turns of one sequence; M layers that choose K experts; or R runs of equal values.
"""


DESCRIBED = "openrlhf.loop", "openrlhf.observability.hooks"
"""Packages with classes whose methods the page describes."""


def section(name: str) -> str:
    """Returns the text about one public name."""
    found = getattr(openrlhf, name)
    lines = [f"### `{name}`", "", text_of(found), ""]
    if issubclass(found, Enum):
        lines += [f"- `{item.name}`" for item in found]
    elif is_dataclass(found) and name not in ("Hook", "PolicyLoss", "AdvantageEstimator"):
        texts = field_texts(found)
        rows = [f"| `{field.name}` | {texts.get(field.name, '')} |" for field in fields(found)]
        lines += ["| field | |", "|---|---|", *rows, ""]
    for method, made in methods(found) if found.__module__.startswith(DESCRIBED) else []:
        called = name if method == "__init__" else f"{name}.{method}"
        lines += [f"#### `{called}{signature(made)}`", "", text_of(made), ""]
    return "\n".join(lines).rstrip() + "\n"


def field_texts(found: type) -> dict[str, str]:
    """Returns the text of each field of a class: the docstring below it, or the comment beside it."""
    texts: dict[str, str] = {}
    for base in filter(is_dataclass, reversed(found.__mro__)):
        source = inspect.getsource(base)
        body = next(node.body for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
        for field, below in zip_longest(body, body[1:]):
            match field, below:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    texts[name] = " ".join(text.split())
                case ast.AnnAssign(target=ast.Name(name), end_lineno=int(line)), _:
                    texts[name] = source.splitlines()[line - 1].partition("  # ")[2]
    return texts


def methods(found: type) -> list[tuple[str, Any]]:
    public = {name: value for name, value in vars(found).items() if inspect.isfunction(value)}
    named = lambda name: name == "__init__" or not name.startswith("_")
    return [(name, value) for name, value in public.items() if named(name) and value.__doc__]


def signature(made: Any) -> str:
    """Returns the parameters without their types, which the text explains."""
    parameters = [p.replace(annotation=p.empty) for p in inspect.signature(made).parameters.values()][1:]
    return str(inspect.Signature(parameters))


def text_of(found: Any) -> str:
    return inspect.cleandoc(found.__doc__ or "").replace("\n    ", "\n  ")


def page() -> str:
    """Returns the page as text."""
    head = HEAD.format(example=EXAMPLE.read_text().partition('"""\n\n')[2].strip())
    return "\n".join([head, "## Names", "", *map(section, sorted(PUBLIC, key=lambda n: (n != "Run", n)))])


def main() -> None:
    print(page(), end="")


if __name__ == "__main__":
    main()
