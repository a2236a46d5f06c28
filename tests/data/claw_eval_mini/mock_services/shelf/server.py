"""A library's loans: a mock service in the benchmark's way, with its state in module globals."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from fastapi import FastAPI
from mock_services._base import add_error_injection
from pydantic import BaseModel

app = FastAPI(title="Shelf")
add_error_injection(app)

FIXTURES_PATH = Path(
    os.environ.get(
        "SHELF_FIXTURES",
        str(
            Path(__file__).resolve().parents[2] / "tasks" / "L001zh_overdue_loans" / "fixtures" / "shelf" / "loans.json"
        ),
    )
)
RESET_FAILS = os.environ.get("SHELF_RESET_FAILS", "")

_loans: list[dict[str, Any]] = []
_calls: list[dict[str, Any]] = []
_reminded: list[str] = []
_deleted: list[str] = []


def _load() -> None:
    global _loans
    _loans = json.loads(FIXTURES_PATH.read_text(encoding="utf-8"))


_load()


class One(BaseModel):
    loan_id: str


class Pause(BaseModel):
    seconds: float


def _find(loan_id: str) -> dict[str, Any] | None:
    return next((loan for loan in _loans if loan["loan_id"] == loan_id), None)


@app.post("/shelf/loans")
def list_loans() -> dict[str, Any]:
    _calls.append({"endpoint": "/shelf/loans"})
    return {"loans": [{k: loan[k] for k in ("loan_id", "title", "days_over")} for loan in _loans]}


@app.post("/shelf/loans/get")
def get_loan(one: One) -> dict[str, Any]:
    _calls.append({"endpoint": "/shelf/loans/get", "loan_id": one.loan_id})
    return _find(one.loan_id) or {"error": f"no loan {one.loan_id}"}


@app.post("/shelf/loans/remind")
def remind(one: One) -> dict[str, Any]:
    _calls.append({"endpoint": "/shelf/loans/remind", "loan_id": one.loan_id})
    loan = _find(one.loan_id)
    if loan is None:
        return {"error": f"no loan {one.loan_id}"}
    loan["reminders"] += 1
    _reminded.append(one.loan_id)
    return {"reminded": loan["reader"], "reminders": loan["reminders"]}


@app.post("/shelf/loans/delete")
def delete(one: One) -> dict[str, Any]:
    _deleted.append(one.loan_id)
    _loans[:] = [loan for loan in _loans if loan["loan_id"] != one.loan_id]
    return {"left": len(_loans)}


@app.post("/shelf/pause")
def pause(how: Pause) -> dict[str, Any]:
    time.sleep(how.seconds)
    return {"paused": how.seconds}


@app.post("/shelf/broken")
def broken() -> dict[str, Any]:
    raise RuntimeError("shelf collapsed")


@app.get("/shelf/audit")
def audit() -> dict[str, Any]:
    return {"calls": _calls, "reminded": _reminded, "deleted": _deleted}


@app.post("/shelf/reset")
def reset() -> dict[str, str]:
    global _calls, _reminded, _deleted
    if RESET_FAILS:
        raise RuntimeError("no reset today")
    _calls, _reminded, _deleted = [], [], []
    _load()
    return {"status": "reset"}


if __name__ == "__main__":
    import uvicorn

    uvicorn.run(app, host="127.0.0.1", port=int(os.environ.get("PORT", "9171")))
