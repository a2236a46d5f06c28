"""How the time and the memory of an update grow with the length of a row, and with the number of rows.

    python benchmarks/growth.py                                      one row of 256 to 32768 tokens; 1 to 32 rows of 512
    python benchmarks/growth.py --lengths 256 1024 --rows --arms rti-jax

The step and the arms are those of update_step.py, on a model so small that attention soon is most of the work. An
exponent is the slope of a straight line through the logarithms, over all points and over the longer half, where fixed
costs weigh less. Attention's operations grow with T^2 per row, everything else with T; memory should grow with T.
"""

import argparse
import pathlib
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import turns
from turns import RESULTS
from update_step import ARMS, commands, make_folder

SIZE = dict(width=64, mlp=192, layers=2, heads=2, kv=1, vocabulary=1024)
LONG = 8192  # from here on a step takes seconds, so that two are enough


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="*", type=int, default=[256, 1024, 4096, 16384, 32768])
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 4, 16, 32])
    parser.add_argument("--row-length", type=int, default=512, help="of the rows that grow in number")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["rti-jax", "torch"])
    parser.add_argument(
        "--steps", type=int, default=5, help=f"measured ones; of rows from {LONG} tokens on two at most"
    )
    parser.add_argument("--threads", type=int, default=turns.cores())
    parser.add_argument("--remat", choices=["none", "full"], default="none", help="of all arms")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS / "growth")
    given = parser.parse_args()
    given.tunix_python = None
    on, points = turns.machine(given.threads), []
    shapes = [("tokens", (1, n)) for n in given.lengths] + [("rows", (n, given.row_length)) for n in given.rows]
    with tempfile.TemporaryDirectory() as folder:
        parameters = make_folder(pathlib.Path(folder), **SIZE)
        for growing, shape in shapes:
            steps, warm_up = (min(given.steps, 2), 1) if shape[1] >= LONG else (given.steps, 2)
            measured = turns.compare(commands(folder, shape, given, given.remat), given.threads, steps, warm_up)
            turns.check_same_work(measured, ("loss", "grad_norm"))
            for arm, result in measured.items():
                points.append({"growing": growing, "rows": shape[0], "length": shape[1], "arm": arm, **result})
            said = ", ".join(f"{arm} {m['step_s']:.3g} s {m['peak_bytes'] / 1e9:.3g} GB" for arm, m in measured.items())
            print(f"{shape[0]} x {shape[1]}: {said}", flush=True)
    fits = exponents(points)
    text = table(points) + "\n" + fitted(fits)
    print("\n" + text)
    result = {"parameters": parameters, "remat": given.remat, "points": points, "exponents": fits}
    turns.write(given.output, "Growth of an update", result, text, on)


def exponents(points: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Exponents of seconds and peak memory for each arm and what grows, where there are at least three points."""
    found = []
    for growing, arm in dict.fromkeys((p["growing"], p["arm"]) for p in points):
        here = [p for p in points if (p["growing"], p["arm"]) == (growing, arm)]
        if len(here) < 3:
            continue
        sizes = [p["rows"] * p["length"] for p in here]
        for part, chosen in (("all", slice(None)), ("longer half", slice(len(here) // 2, None))):
            slopes = {key: slope(sizes[chosen], [p[key] for p in here][chosen]) for key in ("step_s", "peak_bytes")}
            found.append({"growing": growing, "arm": arm, "points": part, **slopes})
    return found


def slope(sizes: Sequence[float], values: Sequence[float]) -> float:
    """a of values ~ sizes^a by least squares in logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(np.maximum(values, 1e-9)), 1)[0])


def table(points: Sequence[dict[str, Any]]) -> str:
    """A line for each shape: seconds of a step and peak memory of each arm."""
    arms = list(dict.fromkeys(p["arm"] for p in points))
    lines = []
    for growing, rows, length in dict.fromkeys((p["growing"], p["rows"], p["length"]) for p in points):
        here = {p["arm"]: p for p in points if (p["growing"], p["rows"], p["length"]) == (growing, rows, length)}
        values = [f"{here[a]['step_s']:.3g}" for a in arms] + [f"{here[a]['peak_bytes'] / 1e9:.3g}" for a in arms]
        lines.append([growing, f"{rows} x {length}", *values])
    return turns.table(["growing", "rows x tokens", *(f"{a} s" for a in arms), *(f"{a} GB" for a in arms)], lines)


def fitted(fits: Sequence[dict[str, Any]]) -> str:
    lines = [[f["growing"], f["arm"], f["points"], f"{f['step_s']:.2f}", f"{f['peak_bytes']:.2f}"] for f in fits]
    return (
        turns.table(["growing", "arm", "points", "exponent of the time", "of the peak memory"], lines) if lines else ""
    )


if __name__ == "__main__":
    main()
