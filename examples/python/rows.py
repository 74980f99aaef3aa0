"""Functions for --data.row_func: each makes rows of public datasets into rows that the flags read. Write your
own in the same way: it gets a row as a dict, and returns a row, or None to leave the row out."""

import json
import re


def joined(*texts):
    return "\n\n".join(text for text in texts if text)


def alpaca(row):
    """Alpaca: an instruction, with an input that may be empty."""
    return {"input": joined(row["instruction"], row["input"]), "output": row["output"]}


def dolly(row):
    return {"input": joined(row["context"], row["instruction"]), "output": row["response"]}


def orca(row):
    """OpenOrca: a system prompt, which may be empty, a question and a response."""
    system = [{"role": "system", "content": row["system_prompt"]}] if row["system_prompt"] else []
    return {"input": [*system, {"role": "user", "content": row["question"]}], "output": row["response"]}


def with_system(row):
    """ShareGPT with the system prompt in a column of its own (LLaMA-Factory, APIGen-MT)."""
    system = [{"from": "system", "value": row["system"]}] if row.get("system") else []
    return row | {"conversations": [*system, *row["conversations"]]}


def capybara(row):
    """Capybara: pairs of input and output."""
    turns = [(("user", turn["input"]), ("assistant", turn["output"])) for turn in row["conversation"]]
    return {"messages": [{"role": role, "content": text} for turn in turns for role, text in turn]}


def lima(row):
    """LIMA: the texts of user and assistant in turn."""
    roles = ("user", "assistant")
    turns = enumerate(row["conversations"])
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in turns]}


def xlam(row):
    """xLAM: a query, and as JSON text the tools and the calls that answer it."""
    calls = json.loads(row["answers"])
    answer = {"role": "assistant", "content": "", "tool_calls": calls}
    return {"messages": [{"role": "user", "content": row["query"]}, answer], "tools": row["tools"]}


def hh_messages(text):
    """Splits a text of HH, with Human: and Assistant: after blank lines, into messages."""
    _, *parts = re.split(r"\n\n(Human|Assistant): ?", text)
    turns = zip(parts[::2], parts[1::2], strict=True)
    return [{"role": "user" if who == "Human" else "assistant", "content": said} for who, said in turns]


def hh(row):
    return {side: hh_messages(row[side]) for side in ("chosen", "rejected")}


def nectar(row):
    """Nectar: ranked answers to a prompt in the form of HH. The best and the worst are the pair."""
    answers = sorted(row["answers"], key=lambda answer: answer["rank"])
    prompt = [message for message in hh_messages(row["prompt"]) if message["content"].strip()]
    return {"prompt": prompt, "chosen": answers[0]["answer"], "rejected": answers[-1]["answer"]}


def ultrafeedback(row):
    """UltraFeedback: completions with scores. The best and the worst are the pair; ties are left out."""
    found = sorted(row["completions"], key=lambda completion: completion["overall_score"])
    margin = found[-1]["overall_score"] - found[0]["overall_score"]
    pair = {"chosen": found[-1]["response"], "rejected": found[0]["response"], "margin": margin}
    return {"prompt": row["instruction"], **pair} if margin else None


def helpsteer2(row):
    """HelpSteer2's preferences: below 0 the first response is better, above 0 the second."""
    responses, strength = [row["response_1"], row["response_2"]], row["preference_strength"]
    return pair_of(row["prompt"], responses, strength)


def helpsteer3(row):
    """HelpSteer3's preferences, on the last of several messages."""
    return pair_of(row["context"], [row["response1"], row["response2"]], row["overall_preference"])


def pair_of(prompt, responses, strength):
    rejected, chosen = responses if strength > 0 else responses[::-1]
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected} if strength else None


def helpsteer(row):
    """HelpSteer's scores as labels of KTO: 4 is good, 0 to 2 are bad, 3 is left out."""
    score = row["helpfulness"]
    return None if score == 3 else {"input": row["prompt"], "output": row["response"], "label": score == 4}


def shp(row):
    """SHP: labels is 1 if answer A is the better one."""
    a, b = row["human_ref_A"], row["human_ref_B"]
    chosen, rejected = (a, b) if row["labels"] else (b, a)
    return {"prompt": row["history"], "chosen": chosen, "rejected": rejected}


def math_shepherd(row):
    """Math-Shepherd: a text with a placeholder behind each step, and the same with a label in its place."""
    places = [match.start() for match in re.finditer("ки", row["input"])]
    labels = [row["label"][place - i] for i, place in enumerate(places)]  # a label is one character shorter
    return {"input": row["input"], "label": labels}


def stepwise(row, end="ки"):
    """Steps with labels true and false, as TRL has them."""
    text = row["prompt"] + "".join(f"\n{step} {end}" for step in row["completions"])
    return {"input": text, "label": ["+" if label else "-" for label in row["labels"]]}


def prm800k(row):
    """PRM800K: the chosen completion of each step, good if its rating is 1; up to the first step without."""
    steps = []
    for step in row["label"]["steps"]:
        chosen = step["chosen_completion"]
        found = step["completions"][0 if chosen is None else chosen]
        steps.append((found["text"], found["rating"] == 1))
        if chosen is None:
            break
    texts, labels = zip(*steps, strict=True)
    return stepwise({"prompt": row["question"]["problem"], "completions": texts, "labels": labels})


def verl(row):
    """The rows of verl, as of DAPO-17k: the label is within an object."""
    return {"input": row["prompt"], "label": row["reward_model"]["ground_truth"]}
