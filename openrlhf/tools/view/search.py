"""Filters and sorts rollouts, and returns them page by page. Every value that a user types is a parameter of
the query, never part of its text."""

from typing import Any, Literal, get_args

from pydantic import ConfigDict, Field, create_model

from openrlhf.tools.view.index import TYPES, Index

Order = Literal["step", "reward", "score", "length", "turns", "version", "prompt_id"]
ORDERS: tuple[Order, ...] = get_args(Order)
EXCERPT = 240
"""Number of characters of a prompt and of an answer that a list shows."""
ERRORS_SHOWN = 100
ERROR_CHARACTERS = 300

RANGES = ("step", "reward", "score", "length", "turns", "version")
"""Columns with filters NAME_min and NAME_max."""
EXACT = ("run", "kind", "prompt_id", "source", "outcome", "truncated", "finish_reason")
"""Columns with a filter for one value."""
LISTED = ("run", *(name for name in TYPES if name not in ("prompt", "response")))
"""Columns of a list, besides the beginnings of texts."""
_LOG = "list_filter(extra_logs, lambda log: log.name = ?)[1].value"


LIMITS: dict[str, Any] = {f"{name}_{end}": (float | None, None) for name in RANGES for end in ("min", "max")}
Limits: Any = create_model("Limits", **LIMITS)


class Search(Limits):
    """A filter, an order and a page. None and empty texts do not filter."""

    model_config = ConfigDict(extra="forbid")

    run: int | None = None
    kind: str | None = None
    prompt_id: int | None = None
    source: str | None = None
    outcome: str | None = None
    finish_reason: str | None = None
    truncated: bool | None = None
    failed: bool | None = None
    """True: only samples that an error left without a reward; False: only the others."""
    text: str = ""
    """Text that the prompt or the answer contains."""
    prompt: str = ""
    response: str = ""
    error: str = ""
    ignore_case: bool = False
    log: str = ""
    """Name in `extra_logs`. `log_min` and `log_max` limit its value, and `by_log` sorts by it."""
    log_min: float | None = None
    log_max: float | None = None
    by_log: bool = False
    sort: Order = "step"
    descending: bool = True
    offset: int = Field(default=0, ge=0)
    limit: int = Field(default=50, ge=1, le=200)

    def condition(self) -> tuple[str, list[Any]]:
        """Returns the condition of a WHERE clause and its parameters."""
        parts: list[tuple[str, list[Any]]] = [("true", [])]
        parts += [(f"{name} = ?", [v]) for name in EXACT if (v := getattr(self, name)) not in (None, "")]
        for name in RANGES:
            for end, sign in (("min", ">="), ("max", "<=")):
                if (value := getattr(self, f"{name}_{end}")) is not None:
                    parts.append((f"{name} {sign} ?", [value]))
        if self.failed is not None:
            parts.append((f"outcome {'<>' if self.failed else '='} 'ok'", []))
        for sign, value in ((">=", self.log_min), ("<=", self.log_max)):
            if self.log and value is not None:
                parts.append((f"{_LOG} {sign} ?", [self.log, value]))
        parts += [self._contains(name) for name in ("error", "prompt", "response") if getattr(self, name)]
        if self.text:
            (prompt, values), (response, _) = (
                self._contains("prompt", self.text),
                self._contains("response", self.text),
            )
            parts.append((f"({prompt} OR {response})", values * 2))
        return " AND ".join(text for text, _ in parts), [value for _, values in parts for value in values]

    def order(self) -> tuple[str, list[Any]]:
        """Returns the content of an ORDER BY clause and its parameters. Ties are in the journal's order."""
        key = _LOG if self.by_log and self.log else self.sort
        direction = "DESC" if self.descending else "ASC"
        values = [self.log] if key == _LOG else []
        return f"{key} {direction} NULLS LAST, run, step {direction}, kind, id", values

    def _contains(self, name: str, text: str | None = None) -> tuple[str, list[Any]]:
        text = getattr(self, name) if text is None else text
        if self.ignore_case:
            return f"contains(lower({name}), ?)", [text.lower()]
        return f"contains({name}, ?)", [text]


def find(index: Index, search: Search) -> dict[str, Any]:
    """Returns the number of matching rollouts, and those of the page."""
    where, values = search.condition()
    order, of_order = search.order()
    ids = index.rows(
        f"SELECT run, id, count(*) OVER () AS total FROM rollouts WHERE {where}"
        f" ORDER BY {order} LIMIT ? OFFSET ?",
        [*values, *of_order, search.limit, search.offset],
    )
    rows: dict[tuple[int, int], dict[str, Any]] = {}
    for run in {found["run"] for found in ids}:
        # Texts are long, so they are read for the rollouts of the page only.
        texts = f"left(prompt, {EXCERPT}) AS prompt, left(response, {EXCERPT}) AS response"
        query = f"SELECT id, {', '.join(LISTED)}, {texts} FROM rollouts"
        query += " WHERE run = ? AND id IN (SELECT unnest(?))"
        of_run = [found["id"] for found in ids if found["run"] == run]
        rows |= {(run, row.pop("id")): row for row in index.rows(query, [run, of_run])}
    listed = [rows[key] for found in ids if (key := (found["run"], found["id"])) in rows]
    return {"total": ids[0]["total"] if ids else 0, "rows": listed}


def errors(index: Index, search: Search) -> list[dict[str, Any]]:
    where, values = search.condition()
    return index.rows(
        f"SELECT outcome, left(error, {ERROR_CHARACTERS}) AS error, count(*) AS count, min(step) AS first,"
        f" max(step) AS last FROM rollouts WHERE {where} AND outcome <> 'ok'"
        f" GROUP BY ALL ORDER BY count DESC, last DESC LIMIT {ERRORS_SHOWN}",
        values,
    )


def choices(index: Index) -> dict[str, list[str]]:
    found = {
        name: [
            row["v"] for row in index.rows(f"SELECT DISTINCT {name} AS v FROM rollouts ORDER BY v LIMIT 100")
        ]
        for name in ("kind", "source", "outcome", "finish_reason")
    }
    found["log"] = log_names(index)[:100]
    return {name: [value for value in values if value] for name, values in found.items()}


def log_names(index: Index) -> list[str]:
    """Returns the names in `extra_logs` of the newest rollouts, because a scan of all would take long."""
    newest = "SELECT extra_logs FROM rollouts ORDER BY step DESC LIMIT 2000"
    logs = f"SELECT DISTINCT unnest(extra_logs).name AS v FROM ({newest})"
    return sorted(row["v"] for row in index.rows(logs))
