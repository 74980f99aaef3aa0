import json
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf.observe.journal import journal_steps, read_journal, write_journal
from openrlhf.observe.run_folder import read_jsonl
from openrlhf.types import Outcome, Prompt, Trajectory

TWO_TURNS = Trajectory(
    prompt=Prompt(prompt_id=7, text="2+2?", label={"answer": [4]}, source="sums", episode=2),
    sample_index=3,
    token_ids=[10, 11, 20, 21, 30, 22],
    action_mask=[False, False, True, True, False, True],
    rollout_log_probs=[-0.1, -1e-9, -math.pi],
    weight_versions=[4, 4, 5],
    reward=0.5,
    score=1.0,
    truncated=True,
    finish_reason="length",
    seed=2**63 + 1,
    extra_logs={"format": 1.0},
)
FAILED = Trajectory(
    prompt=Prompt(prompt_id=8, text="\x1b[2J <script> \ud800 日本"),
    sample_index=0,
    token_ids=[10],
    action_mask=[False],
    rollout_log_probs=[],
    weight_versions=[],
    reward=None,
    outcome=Outcome.ENV_ERROR,
    error="TimeoutError: no answer\nin 30 s",
)


def test_what_a_line_says(tmp_path):
    path = write_journal(
        tmp_path, 12, [TWO_TURNS, FAILED], decode=lambda ids, after: f"<{after}{ids}>", advantages=[0.25, 0.0]
    )
    assert path == tmp_path / "step_000012.jsonl"
    first, second = read_jsonl(path)
    assert first["response"] == "<[10, 11][20, 21, 30, 22]>"
    assert first["action_ranges"] == [[2, 4], [5, 6]]
    assert first["weight_versions"] == [[4, 2], [5, 1]]
    assert first["advantage"] == 0.25 and first["prompt_id"] == 7 and first["source"] == "sums"
    assert second["outcome"] == "env_error" and second["reward"] is None and second["response"] == "<[10][]>"


def test_round_trip(tmp_path):
    path = write_journal(tmp_path, 1, [TWO_TURNS, FAILED])
    assert read_journal(path) == [TWO_TURNS, FAILED]
    assert [row["response"] for row in read_jsonl(path)] == [None, None]


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_round_trip_of_any_trajectory(tmp_path_factory, data):
    mask = data.draw(st.lists(st.booleans(), max_size=20))
    num_actions = sum(mask)
    draw_list = lambda values: data.draw(st.lists(values, min_size=num_actions, max_size=num_actions))
    trajectory = Trajectory(
        prompt=Prompt(prompt_id=data.draw(st.integers(0)), text=data.draw(st.text())),
        sample_index=0,
        token_ids=data.draw(st.lists(st.integers(0, 2**31), min_size=len(mask), max_size=len(mask))),
        action_mask=mask,
        rollout_log_probs=draw_list(st.floats(allow_nan=False)),
        weight_versions=draw_list(st.integers(0, 3)),
        reward=data.draw(st.none() | st.floats(allow_nan=False)),
        extra_logs=data.draw(st.dictionaries(st.text(), st.floats(allow_nan=False), max_size=3)),
    )
    path = write_journal(tmp_path_factory.getbasetemp(), 1, [trajectory])
    assert read_journal(path) == [trajectory]


def test_non_finite_numbers_are_strict_json(tmp_path):
    numbers = Trajectory(
        prompt=Prompt(prompt_id=0, text=""),
        sample_index=0,
        token_ids=[1, 2],
        action_mask=[False, True],
        rollout_log_probs=[float("-inf")],
        weight_versions=[0],
        reward=float("nan"),
    )
    path = write_journal(tmp_path, 1, [numbers])
    row = json.loads(path.read_text(), parse_constant=lambda name: 1 / 0)
    assert row["reward"] == "NaN" and row["rollout_log_probs"] == ["-Infinity"]
    assert math.isnan(read_journal(path)[0].reward)


def test_files_are_found_by_step_and_a_second_write_replaces(tmp_path):
    for step in (1_000_000, 2, 10):
        write_journal(tmp_path, step, [TWO_TURNS])
    write_journal(tmp_path, 2, [FAILED])
    write_journal(tmp_path, 2, [FAILED], name="eval")
    (tmp_path / ".step_000003.jsonl.tmp").write_text("killed while writing")
    assert list(journal_steps(tmp_path)) == [2, 10, 1_000_000]
    assert read_journal(journal_steps(tmp_path)[2]) == [FAILED]
    assert list(journal_steps(tmp_path, "eval")) == [2]
