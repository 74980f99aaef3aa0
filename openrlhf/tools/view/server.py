"""Serves the page of runs on loopback (`openrlhf view`).

Every address begins with a secret token, which the command prints. A request without it gets 403, and one for
another host name 400, so that pages of other sites can read nothing. All answers are data, which the page
shows as text. Its Content-Security-Policy permits only its own scripts."""

import hmac
import os
import secrets
import signal
import socket
import webbrowser
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cache, wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import uvicorn
from fastapi import APIRouter, FastAPI, Query, Request, Response
from fastapi.responses import FileResponse
from starlette.middleware.trustedhost import TrustedHostMiddleware

from openrlhf.api import ErrorCode, RunFolder, RunIndex, UsageError, counted, headlines, to_json
from openrlhf.tools.command_line.runs import find_runs
from openrlhf.tools.view import rollout
from openrlhf.tools.view.curves import SMOOTHING, drawn_curve, equal_metrics, sections
from openrlhf.tools.view.index import Index
from openrlhf.tools.view.metrics import Metrics
from openrlhf.tools.view.rollout import TokenTexts
from openrlhf.tools.view.rollouts import token_texts
from openrlhf.tools.view.search import Search, choices, errors, find, log_names

HOST = "127.0.0.1"
NAMES = [HOST, "localhost"]
"""Host names that requests may have. Another one comes from a site whose name was pointed at this address
(DNS rebinding)."""
STATIC = Path(__file__).parent / "static"
WARNINGS_SHOWN = 100
MOST_POINTS = 2000
"""Maximum number of points of a curve that the page receives."""
GRACE_SECONDS = 10
"""Seconds that requests have to end after Ctrl-C."""
HEADERS = {
    # 'unsafe-inline': Plotly sets the styles of its elements.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Viewer:
    """The runs of a page, and the data that the page requests."""

    def __init__(
        self, folders: Sequence[Path], token_texts: TokenTexts, *, cache: Path | None = None
    ) -> None:
        self.folders = list(folders)
        self.names = name_runs(folders)
        self.index = Index(folders, cache=cache)
        self.metrics = [Metrics(RunFolder(folder).metrics_path) for folder in folders]
        self._token_texts = token_texts

    def state(self) -> dict[str, Any]:
        return {
            "runs": [self._describe_state(i) for i in range(len(self.folders))],
            "error": self.index.error,
        }

    def _describe_state(self, i: int) -> dict[str, Any]:
        metrics, indexed, problem = self.metrics[i], self.index.runs[i], ""
        try:
            metrics.update()
        except UsageError as error:
            problem = str(error)
        return {
            "name": self.names[i],
            "path": str(self.folders[i]),
            "rows": metrics.num_rows,
            "last_step": metrics.last_step,
            "rollouts": self.index.num_rows(i),
            "files": len(indexed.known),
            "files_waiting": len(indexed.waiting),
            "notes": [
                *([problem] if problem else []),
                *([indexed.note] if indexed.note else []),
                *(f"{name} cannot be read: {reason}" for name, (_, reason) in indexed.damaged.items()),
            ],
        }

    def metric_names(self) -> dict[str, Any]:
        """Returns the names of metrics by section, and those that are shown first. Equal ones are shown
        once."""
        names = sorted({name for metrics in self.metrics for name in metrics.names()})
        shown = headlines(names)
        same = equal_metrics([{name: metrics.curve(name) for name in shown} for metrics in self.metrics])
        return {
            "sections": list(sections(names, log_names(self.index)).items()),
            "headlines": [name for name in shown if name not in same],
        }

    def curves(
        self,
        name: Annotated[list[str], Query()],
        smoothing: Annotated[float, Query(ge=0, le=1)] = SMOOTHING,
    ) -> dict[str, list[dict[str, Any]]]:
        """Returns, for each metric, the curve of each run that has it. `means` is empty if the curve is not
        noisy."""
        return {
            metric: [
                {"run": i, **drawn_curve(curve, MOST_POINTS, smoothing)._asdict()}
                for i, metrics in enumerate(self.metrics)
                if (curve := metrics.curve(metric))
            ]
            for metric in name
        }

    def comparison(self) -> dict[str, Any]:
        runs = [RunIndex(folder) for folder in self.folders]
        flags = [run.flags for run in runs]
        keys = sorted({key for own in flags for key in own})
        values = {key: [own.get(key) for own in flags] for key in keys}
        differing = {key: row for key, row in values.items() if any(value != row[0] for value in row)}
        return {
            "flags": {
                key: [None if v is None else to_json(v) for v in row] for key, row in differing.items()
            },
            "warnings": [run.warnings[-WARNINGS_SHOWN:] for run in runs],
        }

    def rollout(self, run: int, file: str, row: int) -> dict[str, Any]:
        return rollout.shown(rollout.read_row(self.index, run, file, row))

    def token_texts(self, run: int, file: str, row: int) -> dict[str, Any]:
        """Returns {"texts": text of each token of the answer, "note": ""}. If there are no texts, they are
        None and the note is the reason."""
        content = rollout.read_row(self.index, run, file, row)
        try:
            return {"texts": self._token_texts(self.folders[run], content), "note": ""}
        except ValueError as error:
            return {"texts": None, "note": str(error)}

    def diff(
        self, run: int, file: str, row: int, other_run: int, other_file: str, other_row: int
    ) -> dict[str, Any]:
        places = ((run, file, row), (other_run, other_file, other_row))
        texts = [rollout.read_row(self.index, *place).get("response") or "" for place in places]
        return rollout.diff(*texts)

    def choices(self) -> dict[str, list[str]]:
        return choices(self.index)

    def rollouts(self, search: Annotated[Search, Query()]) -> dict[str, Any]:
        return find(self.index, search)

    def errors(self, search: Annotated[Search, Query()]) -> list[dict[str, Any]]:
        return errors(self.index, search)

    def picture(self, run: int, file: str, row: int, number: int) -> bytes:
        images = rollout.read_row(self.index, run, file, row).get("images") or []
        if not 0 <= number < len(images):
            text = f"row {row} has {len(images)} images, and no image {number}"
            raise UsageError(ErrorCode.NOT_FOUND, text, value=file)
        return rollout.picture(self.folders[run], images[number])


def build_app(viewer: Viewer, token: str) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        viewer.index.start()
        yield
        viewer.index.close()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.include_router(build_page(), prefix=f"/{token}")
    app.include_router(build_api(viewer), prefix=f"/{token}/api")

    @app.exception_handler(UsageError)
    async def refuse(request: Request, error: UsageError) -> Response:
        return answer({"error": str(error)}, 404 if error.code == ErrorCode.NOT_FOUND else 422)

    @app.middleware("http")
    async def guard(request: Request, call: Callable[[Request], Awaitable[Response]]) -> Response:
        said = request.url.path.split("/")[1]
        if hmac.compare_digest(said.encode("utf-8", "surrogateescape"), token.encode()):
            response = await call(request)
        else:
            response = Response(
                "The token is missing or wrong. Open the address that `openrlhf view` printed.\n", 403
            )
        response.headers.update(HEADERS)
        return response

    app.add_middleware(TrustedHostMiddleware, allowed_hosts=NAMES, www_redirect=False)
    return app


def build_page() -> APIRouter:
    router = APIRouter()
    files = {name: STATIC / name for name in ("app.js", "colours.css", "style.css")}
    files["plotly.min.js"] = plotly_js()

    @router.get("/")
    def page() -> FileResponse:
        return FileResponse(STATIC / "index.html", media_type="text/html")

    @router.get("/static/{name}")
    def static(name: str) -> Response:
        return FileResponse(files[name]) if name in files else Response(status_code=404)

    return router


def build_api(viewer: Viewer) -> APIRouter:
    router = APIRouter()
    answers: dict[str, Callable[..., Any]] = {
        "state": viewer.state,
        "metrics": viewer.metric_names,
        "curves": viewer.curves,
        "comparison": viewer.comparison,
        "choices": viewer.choices,
        "rollouts": viewer.rollouts,
        "errors": viewer.errors,
        "rollout": viewer.rollout,
        "tokens": viewer.token_texts,
        "diff": viewer.diff,
    }
    for name, function in answers.items():
        router.add_api_route(f"/{name}", _answering(function), response_model=None)

    @router.get("/image")
    def image(run: int, file: str, row: int, number: int) -> Response:
        return Response(viewer.picture(run, file, row, number), media_type="image/png")

    return router


def _answering(function: Callable[..., Any]) -> Callable[..., Response]:
    @wraps(function)
    def respond(**query: Any) -> Response:
        return answer(function(**query))

    return respond


def answer(content: Any, status: int = 200) -> Response:
    """Returns a response in strict JSON, in which NaN and infinities are strings."""
    return Response(to_json(content), status, media_type="application/json")


@cache
def plotly_js() -> Path:
    spec = find_spec("plotly")  # an import takes long
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("plotly", name="plotly")
    return Path(spec.submodule_search_locations[0]) / "package_data" / "plotly.min.js"


def name_runs(folders: Sequence[Path]) -> list[str]:
    """Returns a name for each run: the last parts of its folder's path, as many as make the names differ."""
    paths = [folder.resolve() for folder in folders]
    for depth in range(1, max(len(path.parts) for path in paths)):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def bind(port: int) -> socket.socket:
    """Binds a port of loopback, any free one for 0. Raises UsageError if it cannot be used."""
    try:
        return socket.create_server((HOST, port))
    except OSError as error:
        text = f"cannot be used: {os.strerror(error.errno or 0)}; choose another one, or 0 for any free one"
        raise UsageError(ErrorCode.CLUSTER, text, flag="--port", value=port) from error


def serve(viewer: Viewer, bound: socket.socket, on_start: Callable[[str], None]) -> None:
    token = secrets.token_urlsafe(32)
    app = build_app(viewer, token)
    on_start(f"http://{HOST}:{bound.getsockname()[1]}/{token}/")
    server = uvicorn.Server(
        uvicorn.Config(app, log_level="error", access_log=False, timeout_graceful_shutdown=GRACE_SECONDS)
    )
    for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn raises the signal again when it has ended
        signal.signal(number, lambda number, frame: None)
    server.run(sockets=[bound])


def run(paths: Sequence[Path], port: int, opens_browser: bool) -> None:
    folders = find_runs(paths)
    bound = bind(port)

    def say(address: str) -> None:
        print(f"{counted(len(folders), 'run')} at {address}\nEnd with Ctrl-C", flush=True)
        if opens_browser:
            webbrowser.open(address)

    serve(Viewer(folders, token_texts), bound, say)
