#!/usr/bin/env python3
"""Profiles example kernels with ncu (Nsight Compute), for the tables of the book. Needs a GPU and permission to read its counters.

    examples/kernels/profile.py PROGRAM FILE KERNEL...

PROGRAM  the program `kernels`
FILE     receives JSON: for each entry point, the metrics of its longest launch
KERNEL   numbers, names or families, as in `kernels run`

The clock is not fixed (--clock-control none), so times are close to those of `kernels run`.
"""

import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path

# Keys of the JSON, and metrics of ncu.
METRICS = {
    "us": "gpu__time_duration.sum",
    "dram_percent": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "tensor_percent": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "issue_percent": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "warps_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread",
}
STALLS = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
# Prefixes of the names of cuBLASLt's kernels.
LIBRARIES = ("nvjet", "cutlass", "void ", "sm80_", "sm90_")
# A kernel runs at two sizes, first the small one, and some kernels have the same grid for both.
LAUNCHES = 2


def main():
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    program, output, *kernels = sys.argv[1:]
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory, "ncu.csv")
        metrics = [*METRICS.values(), "regex:" + STALLS.format(".*")]
        command = ["ncu", "--clock-control", "none", "--filter-mode", "per-launch-config", "--launch-count", str(LAUNCHES)]
        command += ["--metrics", ",".join(metrics), "--csv", "--page", "raw", "--log-file", log]
        command += [Path(program).resolve(), "run", *kernels, "--device", "cuda"]
        try:
            run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        except FileNotFoundError:
            sys.exit("error: ncu: expected it on PATH, found none; it is a part of the CUDA toolkit")
        if run.returncode:
            sys.exit(f"{run.stdout}\n{log.read_text() if log.exists() else ''}\nerror: ncu ended with exit code {run.returncode}")
        # The first line is, for example, "NVIDIA H200, sm_90a kernels".
        machine, architecture = run.stdout.splitlines()[0].removesuffix(" kernels").split(", ")
        rows = [row | {"arch": architecture} for row in profile(log.read_text())]
    Path(output).write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    for row in rows:
        print(row)


def profile(text):
    """Returns the longest launch of each entry point, in the order of the first launches."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    launches = list(csv.DictReader(lines))
    if len(launches) < 2:
        sys.exit(f"{text}\nerror: ncu: expected launches, found none")
    units, launches = launches[0], launches[1:]
    scales = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6, "usecond": 1.0, "nsecond": 1e-3, "msecond": 1e3, "second": 1e6}
    longest = {}
    for launch in launches:
        if launch["Kernel Name"].startswith(LIBRARIES):
            continue
        value = lambda metric: float(launch[metric].replace(",", "") or "nan")
        row = {"entry": launch["Kernel Name"].split("(")[0]}
        row |= {key: round(value(metric), 1) for key, metric in METRICS.items()}
        row["registers"] = int(row["registers"])
        row["us"] = round(value(METRICS["us"]) * scales[units[METRICS["us"]]], 1)
        before, after = STALLS.split("{}")
        stalls = {c[len(before) : -len(after)]: value(c) for c in launch if c.startswith(before) and c.endswith(after)}
        stalls = {reason: cycles for reason, cycles in stalls.items() if "selected" not in reason}
        row["stalls"] = [[reason, round(stalls[reason], 1)] for reason in sorted(stalls, key=stalls.get, reverse=True)[:2]]
        if row["us"] >= longest.get(row["entry"], row)["us"]:
            longest[row["entry"]] = row
    return list(longest.values())


if __name__ == "__main__":
    main()
