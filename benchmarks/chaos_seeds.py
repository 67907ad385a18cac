"""`thinwire chaos` on many seeds: does every one of them pass?

    python -m benchmarks.chaos_seeds --seeds 100 112 --minutes 5

The script is `benchmarks.elastic_worker`, a plain elastic training of half a minute on four processes, under
eight strategies in turn; five faults a seed (kills, rejoins, freezes, slow hosts). Seeds that the result file
has are not run again.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, ROOT, note, parser_of, print_head, print_row
from thinwire.bench.config import provenance

STRATEGIES = (
    *("all-reduce", "gossip-grad", "stochastic-gradient-push", "sasgd:interval=4", "topk:density=0.1"),
    *("downpour", "easgd:interval=2", "diloco:interval=3:outer_momentum=0.3"),
)
"""With DiLoCo's usual momentum of 0.9 this training diverges after 600 steps, with and without faults."""
SILENCE_S = 3
SECONDS = 25
FAULTS = 5


def run_seed(seed: int) -> dict[str, Any]:
    """One run of the command."""
    strategy = STRATEGIES[seed % len(STRATEGIES)]
    options = [
        "--faults",
        FAULTS,
        "--begin",
        "1s",
        "--every",
        "3s",
        "--silence",
        f"{SILENCE_S}s",
        "--seed",
        seed,
    ]
    script = ["--", "-m", "benchmarks.elastic_worker", strategy, SECONDS, SILENCE_S]
    with tempfile.TemporaryDirectory() as folder:
        words = [
            sys.executable,
            "-m",
            "thinwire",
            "chaos",
            "--json",
            "--out",
            f"{folder}/run",
            *options,
            *script,
        ]
        done = subprocess.run(list(map(str, words)), cwd=ROOT, capture_output=True, text=True, check=False)
        if not done.stdout.strip():
            raise RuntimeError(done.stderr)
        report = json.loads(done.stdout)
    keep = ("fault", "noticed_by", "how", "noticed_s", "resumed_s")
    return {
        "seed": seed,
        "strategy": strategy,
        "faults": [{name: each[name] for name in keep} for each in report["faults"]],
        **{name: report[name] for name in ("samples", "generations", "steps", "models", "wrong")},
        "status": done.returncode,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, nargs=2, default=[100, 112], metavar=("FIRST", "END"))
    parser.add_argument("--minutes", type=float, default=5.0, help="begin no seed after so long")
    parser.add_argument("--result", type=Path, default=RESULTS / "chaos_seeds.json")
    options = parser.parse_args()
    saved = json.loads(options.result.read_text()) if options.result.exists() else {}
    begin, runs = saved.get("begin", provenance()), saved.get("runs", [])
    began_s = time.monotonic()
    for seed in range(*options.seeds):
        if seed in {run["seed"] for run in runs}:
            continue
        if time.monotonic() > began_s + 60 * options.minutes:
            note("the time is up: run it again for the rest")
            break
        runs.append(run_seed(seed))
        note(json.dumps(runs[-1]))
        lines = ",\n  ".join(json.dumps(run) for run in runs)
        head = json.dumps({"begin": begin}, indent=1, default=str)
        options.result.write_text(head[:-2] + ',\n "runs": [\n  ' + lines + "\n ]\n}\n")
    print_head("seed", "strategy", "faults", "generations", "samples twice", "never", "models", "wrong")
    for run in runs:
        samples = run["samples"]
        counts = (run["generations"], samples["doubled"], samples["missing"], run["models"])
        print_row(run["seed"], run["strategy"], len(run["faults"]), *counts, "; ".join(run["wrong"]) or "-")


if __name__ == "__main__":
    main()
