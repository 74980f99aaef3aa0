"""Prints the pages of errors: `python tools/errors_page.py > docs/errors.md`, and with the word `messages`
docs/messages.md. Codes and messages are explained in openrlhf/tools/doctor, for `openrlhf explain` too."""

import re
import sys
import textwrap
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from openrlhf.tools.doctor.codes import CODES, meanings
from openrlhf.tools.doctor.messages import MESSAGES

WIDTH = 118
HEAD = """\
# Errors

A command that cannot start, or a run that fails, prints an error for each problem. The first line of an error ends with
its code in brackets:

    error: --data.input_key questions: train.jsonl has no such column. [missing-column]
    Its columns: question, answer
    Did you mean question?

An error begins with the flag and its value, or with the file and the row. `OPENRLHF_DEBUG=1` shows the traceback.
`openrlhf explain` prints what this page says of a code, without network:

```bash
openrlhf explain missing-column
openrlhf explain "CUDA out of memory"    # errors of libraries are explained by their text
openrlhf explain train.log               # all that is known of the errors in a log
```

[messages.md](messages.md) lists the errors of Ray, vLLM, DeepSpeed, NCCL, CUDA and transformers that it knows.

| exit status | meaning |
|---|---|
| 2 | a flag, file or model is wrong, so the command did not start |
| 1 | the run failed; or a check, verification, rehearsal, diagnosis or comparison found problems |
| 75 | Ctrl-C or SIGTERM ended the run after a step, with a checkpoint ([run_folder.md](run_folder.md#interrupted-runs)) |
| 130, 143 | Ctrl-C or SIGTERM ended the run immediately |

## Codes

`python tools/errors_page.py > docs/errors.md` writes this page.
"""
TAIL = """\
## Values that are not finite

NaN and infinity are not trained on, not saved and not sent to engines. All ranks act together on a value that one of them
finds.

| where | when | what happens |
|---|---|---|
| loss, metric or gradient of an optimizer step | before the step is applied | `--train.on_nonfinite` decides |
| weights | after every optimizer step, and before each weight sync, checkpoint and export | the run ends and names the weight and the rank |
| optimizer states, master weights, moving average | before each checkpoint and export | as for weights |
| log-probs and values of policy, critic, reference and teacher | before advantages are computed | the run ends |
| log-probs with which an engine sampled | when the episode ends | the sample is an `env_error` |
| rewards and scores | when the source answers | the sample is a `reward_error` |

`--train.on_nonfinite stop`, the default, ends the run with exit status 1. The message names the checkpoint to resume
from, which was saved before such a value existed.

`--train.on_nonfinite skip_step` continues with the next step. A skipped step changes no weights, optimizer states or
moving averages. It counts as a step, and the learning rate follows its schedule as if the step had been applied. Its row
of metrics leaves out values that are not finite, and its `skipped` is 1. More than 10 skipped steps in a row end the run.
If the weights themselves are not finite, no later step can repair them, so the run ends with both settings.

In fp16, DeepSpeed scales the loss and, with both settings, skips steps whose gradients overflow until the scale fits.
"""
MESSAGES_HEAD = """\
# Errors of libraries

Frequent errors of the libraries below openrlhf and of the system: what they mean here, and the remedy with our flags.
`openrlhf explain` finds them in a text or in a log:

```bash
openrlhf explain nccl-timeout
openrlhf explain "Watchdog caught collective operation timeout"
openrlhf explain worker-17.err
```

In a long log the first error is the cause, and later ones follow from it. [errors.md](errors.md) has the errors of
openrlhf itself. `python tools/errors_page.py messages > docs/messages.md` writes this page.
"""


def paragraph(text: str) -> str:
    """Returns a text in lines, with flags and variables as code and with links to the pages that it names."""
    pieces = re.split(r"(`[^`]*`)", text)
    pieces[::2] = [
        re.sub(r"(?<![\w-])(--[a-z][\w.-]*\w|[A-Z]+_[A-Z_]+(=\w+)?)", r"`\1`", p) for p in pieces[::2]
    ]
    linked = re.sub(r"docs/(\w+\.md)", r"[\1](\1)", "".join(pieces))
    return textwrap.fill(linked, WIDTH, break_long_words=False, break_on_hyphens=False)


def errors_page() -> str:
    """Returns docs/errors.md."""
    parts = [HEAD]
    for code, meaning in meanings().items():
        about = CODES[code]
        parts += [
            f"### `{code}`\n",
            paragraph(meaning) + "\n",
            paragraph(f"**Causes.** {about.causes}") + "\n",
        ]
        parts += [paragraph(f"**Remedy.** {about.remedy}") + "\n", f"```text\n{about.example}\n```\n"]
    return "\n".join([*parts, TAIL])


def messages_page() -> str:
    """Returns docs/messages.md."""
    parts = [MESSAGES_HEAD]
    for source in dict.fromkeys(source for source, _ in MESSAGES):
        parts.append(f"## {'The system' if source == 'system' else source}\n")
        for name, message in ((name, m) for (of, name), m in MESSAGES.items() if of == source):
            parts += [f"### `{name}`\n", f"```text\n{message.sample}\n```\n"]
            parts += [paragraph(message.meaning) + "\n", paragraph(f"**Remedy.** {message.remedy}") + "\n"]
    return "\n".join(parts).rstrip() + "\n"


def main() -> None:
    print(messages_page() if sys.argv[1:] == ["messages"] else errors_page(), end="")


if __name__ == "__main__":
    main()
