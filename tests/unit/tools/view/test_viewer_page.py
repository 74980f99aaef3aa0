"""The page of `openrlhf view` in a real Chromium, with hostile texts everywhere.

It needs a Python with QtWebEngine (pip install PySide6-Essentials PySide6-WebEngine): this one, or the
one that OPENRLHF_BROWSER_PYTHON names.
"""

import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import records
import uvicorn
from test_viewer import HOSTILE, TOKEN, answer_of, write, written

from openrlhf.observability.journal import Trained
from openrlhf.tools.view.server import Viewer, bind, build_app
from openrlhf.types import Prompt

PYTHON = os.environ.get("OPENRLHF_BROWSER_PYTHON", sys.executable)
SCREENSHOTS = os.environ.get("OPENRLHF_SCREENSHOTS")
"""Folder for a screenshot after each step of the test; none by default."""
CHROMIUM = Path(__file__).parents[3] / "helpers" / "chromium.py"


@pytest.fixture(scope="module", autouse=True)
def needs_chromium():
    probe = [PYTHON, "-c", "import PySide6.QtWebEngineWidgets"]
    if subprocess.run(probe, capture_output=True, timeout=120, check=False).returncode:
        pytest.skip(f"{PYTHON} has no QtWebEngine: pip install PySide6-Essentials PySide6-WebEngine")


def drive(address: str, steps: list[str]) -> dict:
    command = [PYTHON, str(CHROMIUM), address, *([SCREENSHOTS] if SCREENSHOTS else [])]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command,
        input=json.dumps(steps),
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def address(tmp_path):
    """The address of a page with two runs: the second one has everything that the page can show."""
    run = written(tmp_path, "run <img src=x onerror=alert(5)>")
    sampled = records.trajectory(
        0.25,
        token_ids=[9, 1, 2, 8, 3],
        action_mask=[False, True, True, False, True],
        turn_starts=[1, 4],
        rollout_log_probs=[-0.1, -2.0, -3.0],
        versions=[4, 4, 5],
        prompt=Prompt(prompt_id=7, text=HOSTILE, label=HOSTILE),
        extra_logs={HOSTILE: 0.5},
        extra_texts={"judge": f"not polite {HOSTILE}"},
    )
    batch = records.batch_of([sampled], log_probs=[-0.2, -1.0, -3.0], advantages=[1.0, -1.0, 0.5])
    trained = Trained(batch=batch, schedule=[[[0]]], first_update=0)
    failed = replace(records.trajectory(None, prompt_id=8), error=HOSTILE)
    write(run, 1, [sampled, failed], decode=answer_of(f"we add two {HOSTILE}"), trained=trained)
    write(run, 2, [replace(sampled, reward=0.75)], decode=answer_of(f"we add three {HOSTILE}"))

    def texts(folder, row):
        """Returns the tokens of the answer; meanwhile the run goes on."""
        write(run, 3, [sampled], decode=answer_of("newer"))
        return ["we add ", row["response"][7:12], " ", row["response"][13:]]

    viewer = Viewer([written(tmp_path, "other"), run], texts, cache=tmp_path / "cache")
    bound = bind(0)
    server = uvicorn.Server(uvicorn.Config(build_app(viewer, TOKEN), log_level="critical"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    yield f"http://127.0.0.1:{bound.getsockname()[1]}/{TOKEN}/"
    server.should_exit = True
    thread.join(30)


ROWS = "document.querySelectorAll('#table tbody tr')"


def test_the_page_shows_runs_and_no_text_is_markup(address):
    hostile = json.dumps(HOSTILE)
    steps = {
        "curves": "document.querySelectorAll('.chart .plot .main-svg').length > 0",
        "metric of a hostile name": f"choose({hostile}, true) && [...document.querySelectorAll('.chart h2')]"
        f".some((title) => title.textContent.startsWith({hostile}))",
        "rollouts": f"(open('rollouts'), {ROWS}.length === 3)",
        "a row": f"(window.clicked ??= ({ROWS}[0].click(), 1),"
        " document.querySelectorAll('.tokens span').length === 4)",
        "tokens": "[...document.querySelectorAll('.tokens span')].map((span) => span.textContent).join('')",
        "given tokens": "document.querySelectorAll('.tokens .given').length === 1",
        "colours": "[...document.querySelectorAll('.tokens span')][1].style.backgroundColor",
        "what the judge said": "[...document.querySelectorAll('#detail pre')]"
        f".some((node) => node.textContent === 'not polite ' + {hostile})",
        "all texts": f"document.querySelector('#detail').textContent.split({hostile}).length >= 4",
        "newer step": f"{ROWS}.length === 4",
        "filter": "(state.search = {text: 'three'}, loadRollouts(), state.total === 1)",
        "unfilter": "(state.search = {}, loadRollouts(), state.total === 4)",
        "difference": "(state.compared = [placeOf(state.rows[1]), placeOf(state.rows[2])], showDiff(),"
        " [...document.querySelectorAll('#detail del, #detail ins')]"
        ".some((node) => node.textContent === 'three '))",
        "errors": f"(open('errors'), document.querySelector('td.error').textContent === {hostile})",
        "runs": "(open('comparison'), document.querySelectorAll('#comparison h2').length === 3)",
        "no markup": "document.querySelectorAll('body script, body img, [onerror], a[href^=javascript]')"
        ".length === 0",
        "no script in a text": "(() => { const tag = document.createElement('script'); tag.textContent ="
        " 'window.ran = true'; document.body.append(tag); tag.remove(); return !window.ran; })()",
    }
    found = drive(address, list(steps.values()))
    values = dict(zip(steps, found["values"], strict=True))
    assert all(values.values()), values
    assert values["tokens"].endswith(HOSTILE)
    blocked = [message for message in found["console"] if "inline script" in message]
    assert len(blocked) == 1  # that of the last step
    assert [message for message in found["console"] if message not in blocked] == []
