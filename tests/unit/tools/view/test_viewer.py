"""The page of `openrlhf view`: its index, its queries, what it reads of a run, and who may ask it."""

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import records
from fastapi.testclient import TestClient
from PIL import Image as PILImage
from refusals import refused

from openrlhf.data.images import kept_download
from openrlhf.observability.frames import metrics_to_pandas, rollouts_to_pandas
from openrlhf.observability.journal import Journal, Trained
from openrlhf.observability.metric_names import headlines
from openrlhf.observability.selection import thinned
from openrlhf.tools.command_line.runs import find_runs
from openrlhf.tools.view import flags, index, rollout
from openrlhf.tools.view.metrics import Metrics
from openrlhf.tools.view.search import Search, choices, errors, find
from openrlhf.tools.view.server import MOST_POINTS, STATIC, Viewer, bind, build_app, name_runs
from openrlhf.types import Image, Prompt

TOKEN = "secret"
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>javascript:alert(3)' OR 1=1 -- \u202e"


def write(run: Path, step: int, trajectories, *, name: str = "step", decode=None, **job) -> Path:
    journal = Journal(run / "rollouts", decode=decode)
    path = journal.write(step, trajectories, name=name, **job)
    journal.close()
    assert path
    return path


def written(tmp_path: Path, name: str = "run") -> Path:
    run = tmp_path / name
    (run / "rollouts").mkdir(parents=True)
    with open(run / "metrics.jsonl", "w") as file:
        for step in (1, 2):
            file.write(json.dumps({"step": step, "rollout/reward_mean": step / 2, HOSTILE: "NaN"}) + "\n")
    return run


def answer_of(text: str):
    return lambda ids, after: text


@pytest.fixture
def viewer_of(tmp_path: Path):
    made = []

    def make(*folders: Path, texts=lambda folder, row: []) -> Viewer:
        made.append(Viewer(folders, texts, cache=tmp_path / "cache"))
        while made[-1].index.update():
            pass
        return made[-1]

    yield make
    for viewer in made:
        viewer.index.close()


def client_of(viewer: Viewer, host: str = "127.0.0.1:8890") -> TestClient:
    """Returns a client whose addresses are relative to the page. The index has no thread of its own."""
    return TestClient(build_app(viewer, TOKEN), base_url=f"http://{host}/{TOKEN}/")


def found(viewer: Viewer, **search) -> list[tuple[int, int]]:
    """Returns (step, prompt) of the rollouts that match."""
    rows = find(viewer.index, Search(**search))
    assert rows["total"] >= len(rows["rows"])
    return [(row["step"], row["prompt_id"]) for row in rows["rows"]]


def test_rollouts_are_filtered_sorted_and_searched(tmp_path, viewer_of):
    run = written(tmp_path)
    long = records.trajectory(0.9, (2, 3, 4), prompt_id=1, text="Wie?", truncated=True, versions=[0, 0, 1])
    logged = records.trajectory(0.1, prompt_id=2, text="Was?", source="b", extra_logs={"judge": 3.0})
    failed = records.trajectory(None, prompt_id=3, error="boom: no answer")
    write(run, 1, [long, logged, failed], decode=answer_of("forty-two 50%"))
    write(run, 2, [replace(long, reward=math.nan, truncated=False)], decode=answer_of("Seven"))
    write(run, 2, [logged], name="eval")
    viewer = viewer_of(run)
    assert found(viewer) == [(2, 2), (2, 1), (1, 1), (1, 2), (1, 3)]
    assert found(viewer, kind="eval") == [(2, 2)]
    assert found(viewer, step_max=1, sort="reward") == [(1, 1), (1, 2), (1, 3)]
    assert found(viewer, step_max=1, sort="reward", descending=False) == [(1, 2), (1, 1), (1, 3)]
    assert found(viewer, reward_min=0.5, reward_max=1) == [(1, 1)]
    assert found(viewer, length_min=2, step_min=1) == [(2, 1), (1, 1)]
    assert found(viewer, truncated=True) == [(1, 1)]
    assert found(viewer, failed=True) == found(viewer, error="boom") == [(1, 3)]
    assert found(viewer, failed=False, prompt_id=3) == []
    assert found(viewer, text="forty") == found(viewer, response="50%") == [(1, 1), (1, 2), (1, 3)]
    assert found(viewer, text="seven") == found(viewer, text="%")[3:] == []
    assert found(viewer, text="seven", ignore_case=True) == [(2, 1)]
    assert found(viewer, prompt="Wa", source="b", kind="step") == [(1, 2)]
    assert found(viewer, log="judge", log_min=2.5, kind="step") == [(1, 2)]
    assert found(viewer, log="judge", by_log=True)[:2] == [(2, 2), (1, 2)]
    assert found(viewer, version_min=1) == [(2, 1), (1, 1)]
    assert found(viewer, run=1) == found(viewer, text="' OR true --") == []
    page = find(viewer.index, Search(offset=2, limit=2))
    assert page["total"] == 5 and [row["prompt_id"] for row in page["rows"]] == [1, 2]
    assert errors(viewer.index, Search()) == [
        {"outcome": "reward_error", "error": "boom: no answer", "count": 1, "first": 1, "last": 1}
    ]
    assert choices(viewer.index)["log"] == ["judge"] and choices(viewer.index)["kind"] == ["eval", "step"]


def test_the_index_follows_the_folder_and_is_kept(tmp_path, viewer_of):
    run = written(tmp_path)
    write(run, 1, [records.trajectory(0.5, prompt_id=1)])
    (run / "rollouts" / "step_000009.parquet").write_bytes(b"PAR1 damaged")
    viewer = viewer_of(run)
    state = viewer.state()["runs"][0]
    assert state["rollouts"] == 1 and "step_000009.parquet cannot be read" in state["notes"][0]
    new = write(run, 2, [records.trajectory(0.5, prompt_id=2), records.trajectory(0.5, prompt_id=3)])
    viewer.index.update()
    assert found(viewer) == [(2, 2), (2, 3), (1, 1)]
    new.unlink()
    write(run, 1, [records.trajectory(0.5, prompt_id=7)])
    viewer.index.update()
    assert found(viewer) == [(1, 7)]
    other = viewer_of(run)  # the first viewer has the file of the index
    assert found(other) == [(1, 7)] and "in memory" in other.state()["runs"][0]["notes"][0]
    viewer.index.close()
    again = Viewer([run], lambda folder, row: [], cache=tmp_path / "cache")
    assert again.state()["runs"][0]["rollouts"] == 1 and found(again) == [(1, 7)]
    again.index.close()


def test_journals_of_earlier_versions_are_read(tmp_path, viewer_of):
    run = written(tmp_path, "a[1]*'b")
    old = {
        "prompt_id": 5, "episode": 2, "sample_index": 0, "seed": 3, "source": "s", "label": None,
        "prompt": "p", "response": "r", "reward": 1.0, "score": "NaN", "outcome": "ok", "error": "",
        "finish_reason": "stop", "truncated": False, "extra_logs": {}, "token_ids": [1, 2, 3],
        "action_ranges": [[1, 3]], "weight_versions": [[0, 2]], "rollout_log_probs": [-1.0, -2.0],
    }  # fmt: skip
    (run / "rollouts" / "step_000003.jsonl").write_text(json.dumps(old) + "\n")
    write(run, 4, [records.trajectory(0.5, prompt_id=6)])
    viewer = viewer_of(run)
    rows = find(viewer.index, Search())["rows"]
    assert [(row["prompt_id"], row["epoch"], row["length"]) for row in rows] == [(6, 0, 1), (5, 2, 2)]
    assert viewer.rollout(0, "step_000003.jsonl", 0)["tracks"]["surprisal"] == [1, 2]
    assert viewer.rollout(0, "step_000004.parquet", 0)["tracks"]["surprisal"] == [1]


def test_each_token_has_its_numbers(tmp_path, viewer_of):
    run = written(tmp_path)
    turns = records.trajectory(
        1.0,
        token_ids=[9, 1, 2, 8, 3],
        action_mask=[False, True, True, False, True],
        turn_starts=[1, 4],
        rollout_log_probs=[-1.0, -2.0, -3.0],
        versions=[4, 4, 5],
        seed=2**63 + 1,
    )
    batch = records.batch_of(
        [turns], log_probs=[-1.5, -2.0, -2.0], advantages=[1.0, -1.0, math.nan], returns=[3.0, 2.0, 1.0]
    )
    trained = Trained(batch=batch, schedule=[[[0]]], first_update=0)
    path = write(run, 1, [turns], decode=answer_of("ab<c>"), trained=trained)
    content = viewer_of(run).rollout(0, path.name, 0)
    assert content["prompt_tokens"] == 1 and content["token_ids"] == [1, 2, 8, 3]
    assert content["seed"] == str(2**63 + 1) and content["optimizer_steps"] == [1]
    tracks = content["tracks"]
    assert tracks["gap"] == [-0.5, 0, None, 1] and tracks["surprisal"] == [1, 2, None, 3]
    assert tracks["version"] == [4, 4, None, 5] and tracks["turn"] == [1, 1, None, 2]
    assert tracks["advantages"][:3] == [1, -1, None] and math.isnan(tracks["advantages"][3])
    assert tracks["returns"] == [3, 2, None, 1]
    assert "values" not in tracks and "reference" not in tracks


def test_numbers_of_two_lengths_have_no_difference():
    assert rollout._difference([3.0, 2.0], [1.0, 2.0]) == [2, 0]
    assert rollout._difference(None, [1.0]) is None
    with pytest.raises(ValueError, match="zip"):
        rollout._difference([1.0, 2.0], [1.0])


def test_tokens_have_texts_or_a_reason(tmp_path, viewer_of):
    run = written(tmp_path)
    path = write(run, 1, [records.trajectory(1.0, (2, 3))], decode=answer_of("ab"))

    def no_tokenizer(folder, row):
        raise ValueError("no tokenizer")

    texts = lambda function: viewer_of(run, texts=function).token_texts(0, path.name, 0)
    assert texts(lambda folder, row: ["a", "b"]) == {"texts": ["a", "b"], "note": ""}
    assert texts(no_tokenizer) == {"texts": None, "note": "no tokenizer"}


def test_answers_are_compared_word_by_word():
    both = rollout.diff("we add two\nand stop", "we add three\nand stop")
    assert both == {
        "parts": [["same", "we add "], ["removed", "two\n"], ["added", "three\n"], ["same", "and stop"]],
        "cut": False,
    }
    assert rollout.diff("", "")["parts"] == []
    assert rollout.diff("a " * 5000, "")["cut"]


def test_metrics_are_read_as_far_as_they_grow(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path)
    metrics.update()
    assert metrics.names() == []
    path.write_text('{"step": 1, "a": 1, "timing/score": 2}\n{"step": 2, "a": "NaN"}\n{"step": 3, "a')
    metrics.update()
    assert metrics.num_rows == 2 and metrics.names() == ["a", "timing/logprobs"]
    with open(path, "a") as file:
        file.write('": 3}\n{"step": 2, "b": 5}\n')
    metrics.update()
    assert [value for _, value in metrics.curve("a")][::2] == [1, 3] and metrics.curve("b") == [(2, 5)]
    other = tmp_path / "other"
    other.write_text('{"step": 1, "c": 1}\n')
    other.replace(path)  # a resumed run rewrites the file
    metrics.update()
    assert metrics.names() == ["c"]
    with open(path, "a") as file:
        file.write('{"step": 2, "c": 1}\nno json\n{"step": 3, "c": 1}\n')
    for _ in range(2):
        with refused("unreadable", value=path, row=3):
            metrics.update()
        assert metrics.num_rows == metrics.last_step == 3


def test_long_curves_keep_their_extremes():
    points = [(step, float(step == 77_777)) for step in range(100_000)]
    kept = thinned(points, MOST_POINTS)
    assert len(kept) <= MOST_POINTS and (77_777, 1.0) in kept
    assert (kept[0], kept[-1]) == ((0, 0.0), (99_999, 0.0))
    assert headlines(["eval/x_pass1", "rollout/reward_mean", "z"]) == ["eval/x_pass1", "rollout/reward_mean"]


def test_equal_curves_are_one_tile(tmp_path, viewer_of):
    """The score is the reward in both runs, and the length is in one of them."""
    runs = [written(tmp_path, name) for name in ("a", "b")]
    for factor, run in enumerate(runs, start=1):
        rows = [{"step": i, "rollout/reward_mean": i, "rollout/score_mean": i} for i in (1, 2)]
        rows = [{**row, "rollout/response_length_mean": factor * row["step"]} for row in rows]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    client = client_of(viewer_of(*runs))
    client.get("api/state")  # reads the files
    shown = client.get("api/metrics").json()
    assert shown["headlines"] == ["rollout/reward_mean", "rollout/response_length_mean"]
    results = ["rollout/reward_mean", "rollout/score_mean"]
    assert shown["sections"] == [["Results", results], ["Answers", ["rollout/response_length_mean"]]]


def test_the_viewer_has_the_sections_and_the_running_mean_of_the_report(tmp_path, viewer_of):
    run = written(tmp_path)
    write(run, 3, [records.trajectory(0.5, extra_logs={"politeness": 1.0, "reward_model/tiny": 0.5})])
    names = ("rollout/politeness", "rollout/reward_model/tiny", "timing/update", "policy/loss", "z")
    rows = [{"step": i, "rollout/reward_mean": i % 2, "lr": i, **dict.fromkeys(names, 0)} for i in range(300)]
    rows[7]["rollout/reward_mean"] = "NaN"
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    viewer = viewer_of(run)
    viewer.index.update()
    client = client_of(viewer)
    client.get("api/state")
    assert client.get("api/metrics").json()["sections"] == [
        ["Results", ["rollout/reward_mean", "rollout/reward_model/tiny"]],
        ["Your own metrics", ["rollout/politeness"]],
        ["Training", ["policy/loss", "lr"]],
        ["More", ["z"]],
        ["Time and memory", ["timing/update"]],
    ]
    asked = {"name": ["rollout/reward_mean", "lr"]}
    found = client.get("api/curves", params=asked).json()
    (reward,), (rate,) = found["rollout/reward_mean"], found["lr"]
    assert reward["num_bad"] == 1 and reward["values"][7] == reward["means"][7] == "NaN"
    assert reward["means"][200] == pytest.approx(0.5, abs=0.05) and rate["means"] == []
    raw = client.get("api/curves", params={**asked, "smoothing": 0}).json()["rollout/reward_mean"]
    assert raw == [{**reward, "means": []}]
    assert client.get("api/curves", params={**asked, "smoothing": 2}).status_code == 422


def test_only_this_machine_with_the_token_gets_answers(tmp_path, viewer_of):
    viewer = viewer_of(written(tmp_path))
    client = client_of(viewer)
    for path in (
        "http://127.0.0.1/",
        "http://127.0.0.1/wrong/api/state",
        "http://127.0.0.1/%ff/",
        "http://127.0.0.1/secret2/",
    ):
        assert client.get(path).status_code == 403
    assert client.get("http://localhost:1/secret/api/state").status_code == 200
    assert client.get("api/state", headers={"Host": "evil.example"}).status_code == 400
    page = client.get("")
    policy = dict(part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'" and policy["script-src"] == policy["connect-src"] == "'self'"
    assert (
        page.headers["x-content-type-options"] == "nosniff"
        and page.headers["referrer-policy"] == "no-referrer"
    )
    assert client.get("static/app.js").text == (STATIC / "app.js").read_text()
    assert len(client.get("static/plotly.min.js").content) > 1e6
    assert client.get("static/..%2fserver.py").status_code == 404
    assert client.get("api/rollouts?no_such_field=1").status_code == 422


def test_the_index_goes_on_after_an_error(tmp_path, monkeypatch):
    """The page shows the error until an update succeeds."""
    monkeypatch.setattr(index, "POLL_SECONDS", 0.01)
    viewer = Viewer([written(tmp_path)], lambda folder, row: [], cache=tmp_path / "cache")
    seen, is_done, update = [], threading.Event(), viewer.index.update

    def failing() -> bool:
        seen.append(viewer.index.error)
        if len(seen) <= 2:
            raise OSError("the disk is gone")
        if len(seen) > 3:
            is_done.set()
        return update()

    monkeypatch.setattr(viewer.index, "update", failing)
    viewer.index.start()
    assert is_done.wait(60)
    viewer.index.close()
    failed = "indexing new rollouts failed (OSError: the disk is gone); it is tried again"
    assert seen[:4] == ["", failed, failed, ""]


def test_hostile_text_stays_data(tmp_path, viewer_of):
    run = written(tmp_path, "run <script>alert(4)<")
    bad = records.trajectory(
        None, prompt=Prompt(prompt_id=1, text=HOSTILE, source=HOSTILE, label=HOSTILE), error=HOSTILE
    )
    path = write(
        run,
        1,
        [replace(bad, extra_logs={HOSTILE: math.inf}, extra_texts={HOSTILE: HOSTILE})],
        decode=answer_of(HOSTILE),
    )
    client = client_of(viewer_of(run))
    place = {"run": 0, "file": path.name, "row": 0}
    for address, query in (
        ("state", {}), ("metrics", {}), ("curves", {"name": HOSTILE}), ("choices", {}), ("errors", {}),
        ("rollouts", {"text": HOSTILE}), ("rollout", place), ("tokens", place), ("comparison", {}),
    ):  # fmt: skip
        response = client.get(f"api/{address}", params=query)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "application/json"
        response.json()
    assert client.get("api/rollouts", params={"text": HOSTILE}).json()["total"] == 1
    shown = client.get("api/rollout", params=place).json()
    assert shown["prompt"] == HOSTILE and shown["extra_texts"] == [{"name": HOSTILE, "value": HOSTILE}]
    assert client.get("api/curves", params={"name": HOSTILE}).json()[HOSTILE][0]["values"] == ["NaN", "NaN"]
    assert client.get("api/rollout", params=place | {"file": "../metrics.jsonl"}).status_code == 404
    script = (STATIC / "app.js").read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|srcdoc", script)
    assert not re.search(r"<script>|onclick=|style=", (STATIC / "index.html").read_text())


def test_pictures_come_from_the_folder_of_images_alone(tmp_path, viewer_of, monkeypatch):
    monkeypatch.setenv("OPENRLHF_CACHE", str(tmp_path / "downloads"))
    run = written(tmp_path)
    images = tmp_path / "images"
    images.mkdir()
    PILImage.new("RGB", (3, 2), "red").save(images / "a.png")
    PILImage.new("RGB", (3, 2), "red").save(tmp_path / "outside.png")
    (images / "page.svg").write_text("<svg onload='alert(1)'/>")
    (run / "config.yaml").write_text(f"data:\n  image_root: {images}\n")
    names = ["a.png", "../outside.png", "page.svg", "gone.png", "sha256:00", "https://example.com/a.png"]
    prompt = Prompt(prompt_id=0, text="", images=tuple(Image(name, b"") for name in names))
    seen = replace(records.trajectory(1.0, prompt=prompt), images=prompt.images)
    path = write(run, 1, [seen])
    client = client_of(viewer_of(run))
    get = lambda number: client.get(
        "api/image", params={"run": 0, "file": path.name, "row": 0, "number": number}
    )
    assert get(0).headers["content-type"] == "image/png" and get(0).content.startswith(b"\x89PNG")
    assert [get(i).status_code for i in range(1, len(names) + 1)].count(200) == 0
    kept = kept_download(names[-1])
    kept.parent.mkdir(parents=True)
    PILImage.new("RGB", (3, 2), "red").save(kept, format="PNG")
    assert get(len(names) - 1).content == get(0).content


def test_runs_are_compared(tmp_path, viewer_of):
    first, second = written(tmp_path, "a/run"), written(tmp_path, "b/run")
    (first / "config.yaml").write_text("actor:\n  lr: 1.0\nseed: 1\n")
    (second / "config.yaml").write_text("actor:\n  lr: 2.0\nseed: 1\n")
    (second / "health.jsonl").write_text('{"step": 3, "text": "odd"}\n')
    viewer = viewer_of(first, second)
    assert viewer.names == ["a/run", "b/run"] == name_runs([first, second])
    assert viewer.comparison() == {
        "flags": {"actor.lr": ["1.0", "2.0"]},
        "warnings": [[], [{"step": 3, "text": "odd"}]],
    }
    viewer.state()
    assert [curve["run"] for curve in viewer.curves(["rollout/reward_mean"])["rollout/reward_mean"]] == [0, 1]


def test_the_command_names_what_is_wrong(tmp_path, monkeypatch):
    run = written(tmp_path, "runs/one")
    assert find_runs([run, tmp_path / "runs"]) == [run]
    other = written(tmp_path, "ckpt/deep/runs/two")
    written(tmp_path, "runs/previous/001")  # what a run of the same name has set aside
    assert find_runs([tmp_path]) == [other, run]
    assert find_runs([tmp_path / "runs/previous"]) == [tmp_path / "runs/previous/001"]
    (tmp_path / "empty").mkdir()
    with refused("not-found", value=tmp_path / "empty"):
        find_runs([tmp_path / "empty"])
    with socket.create_server(("127.0.0.1", 0)) as taken, refused("cluster", flag="--port"):
        bind(taken.getsockname()[1])
    with refused("invalid-value", flag="--port") as told:
        flags.view_parser().parse_args(["run", "--port", "99999"])
    assert "'99999' is not a whole number of at least 0 and at most 65535" in str(told.value)
    of_a_text = flags.rollouts_parser().parse_args(["run", "--prompt", "-3"])  # as loops number texts
    assert of_a_text.prompt == -3


def test_notebooks_get_tables(tmp_path):
    run = written(tmp_path)
    write(run, 1, [records.trajectory(0.5, (2, 3), prompt_id=1)])
    write(run, 2, [records.trajectory(None, prompt_id=2)])
    assert metrics_to_pandas(run)["rollout/reward_mean"].to_dict() == {1: 0.5, 2: 1.0}
    frame = rollouts_to_pandas(run)
    assert frame.step.tolist() == [1, 2] and frame.prompt_id.tolist() == [1, 2]
    lengths = rollouts_to_pandas(run, steps=[1], columns=["rollout_log_probs"]).rollout_log_probs.map(len)
    assert lengths.tolist() == [2]
    with refused("not-found", value=run):
        rollouts_to_pandas(run, name="eval")
    with refused("not-found", value=tmp_path):
        metrics_to_pandas(tmp_path)


@pytest.mark.processes
def test_the_command_serves_until_ctrl_c(tmp_path):
    run = written(tmp_path)
    command = [sys.executable, "-m", "openrlhf.cli.main", "view", str(run), "--port", "0", "--no_browser"]
    environment = os.environ | {"OPENRLHF_CACHE": str(tmp_path / "cache")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        address = process.stdout.readline().split()[-1]
        response = httpx.get(f"{address}api/state", timeout=60)  # the port is bound when it is printed
        assert response.json()["runs"][0]["last_step"] == 2
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert not list(run.rglob("*.duckdb")) and list((tmp_path / "cache").rglob("*.duckdb"))
