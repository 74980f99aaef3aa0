"""Reward function that returns the fraction of digits in the answer, and on some calls kills or stops the
engine that calls it. OPENRLHF_TEST_KILLS names a file with one byte for each call so far; without the file
nothing is killed. OPENRLHF_TEST_KILLED_ON lists the numbers of these calls."""

import os
import signal
import time

import psutil

KILLED_ON = [int(number) for number in os.environ.get("OPENRLHF_TEST_KILLED_ON", "4,20").split(",")]
"""Calls on which the engine dies."""
TITLE = os.environ.get("OPENRLHF_TEST_VICTIM", "ray::EngineActor")
SIGNAL = signal.Signals[os.environ.get("OPENRLHF_TEST_SIGNAL", "SIGKILL")]


def reward_func(queries, prompts, labels):
    count = note_call(os.environ.get("OPENRLHF_TEST_KILLS", ""))
    if count in KILLED_ON:
        engine = next(p for p in psutil.Process().parents() if is_titled(p, "ray::EngineActor"))
        server = engine.parent()  # engines and their cores are forked from one process
        victim = next(p for p in [engine, *server.children(recursive=True)] if is_titled(p, TITLE))
        victim.send_signal(SIGNAL)
        if SIGNAL == signal.SIGKILL and victim == engine:
            time.sleep(60)  # the engine's reward processes end with it; they outlive a core
    answers = [query.removeprefix(prompt) for query, prompt in zip(queries, prompts, strict=True)]
    return {"rewards": [sum(c.isdigit() for c in answer) / max(1, len(answer)) for answer in answers]}


def is_titled(process, title):
    return " ".join(process.cmdline()).startswith(title)


def note_call(path):
    if not os.path.exists(path):
        return 0
    with open(path, "ab") as file:
        file.write(b".")
        file.flush()
        return os.fstat(file.fileno()).st_size
