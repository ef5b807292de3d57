#!/usr/bin/env python3
"""Runs each planted fault on a GPU, alone and under each tool of compute-sanitizer, and prints which of them find it.

    compare.py PROGRAM OUTPUT [--seconds 150] [--jobs 16] [--sanitizer compute-sanitizer]

PROGRAM is the binary of examples/planted-faults. OUTPUT.json has the result of each run, and OUTPUT.md the tables. The correct versions
run first, then the faults without a tool, then the faults with each tool. Faults that hang without a tool come last. Runs that the time
does not suffice for are counted as not run.
"""

import argparse
import collections
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time

TOOLS = {
    "memcheck": ["--report-api-errors", "no", "--check-cache-control", "--padding", "256"],
    "racecheck": ["--racecheck-report", "all", "--racecheck-detect-level", "info", "--racecheck-num-workers", "1",
                  "--racecheck-deadlock-timeout", "1000"],
    "synccheck": [],
    "initcheck": [],
}
# Seconds until a process has started, and until it is stopped after it has reported a hang.
START, GRACE = 30.0, 1.0
REPORT = re.compile(r"^========= +(?!COMPUTE-SANITIZER|ERROR SUMMARY|RACECHECK SUMMARY|Internal)(\S.*)")
SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")


def run(options, slot, tool, kernel, fault, end):
    """Returns the outcome of one run: what the program printed, and the reports of the tool."""
    command = [options.program, "run", kernel, fault, "200" if tool == "plain" else "3"]
    environment = dict(os.environ, POISON="1" if tool == "plain" else "0", HANG_SECONDS="2" if tool == "plain" else "4")
    if tool != "plain":
        # Each process has its own ports: parallel ones would connect to each other's program.
        command = [options.sanitizer, "--tool", tool, "--check-exit-code", "no", "--launch-timeout", "60", "--port",
                   str(49152 + 16 * slot), "--show-backtrace", "device", *TOOLS[tool], *command]
    start = time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                                   env=environment, start_new_session=True)
        stop, killed = min(end, start + START), False
        text = ""
        while True:
            try:
                process.wait(0.05)
            except subprocess.TimeoutExpired:
                pass
            text = os.pread(output.fileno(), 1 << 20, 0).decode(errors="replace")
            if process.returncode is not None:
                break
            if re.search("^hang$", text, re.M):
                stop = min(stop, time.monotonic() + GRACE)
            if time.monotonic() > stop:
                killed = True
                break
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
        text = os.pread(output.fileno(), 1 << 20, 0).decode(errors="replace")
    lines = text.splitlines()
    printed = [line for line in lines if line in ("right", "wrong", "hang") or line.startswith("error: ")]
    result = printed[-1] if printed else "killed" if killed else f"exit {process.returncode}"
    if "hang" in printed:
        result = "hang"
    reports = [match[1] for line in lines if (match := REPORT.match(line))]
    counts = [int(match[1] or match[2]) for match in SUMMARY.finditer(text)]
    count = max(counts, default=0)
    errors = [line for line in lines if "Internal" in line and line.startswith("=========")]
    if tool == "plain":
        found = result not in ("right", "killed") or "started" not in lines
    else:
        # A process that is stopped prints no summary.
        found = count > 0 or (not counts and bool(reports))
    return {"kernel": kernel, "fault": fault, "tool": tool, "result": result, "found": found, "count": count,
            "report": reports[0] if reports else "", "seconds": round(time.monotonic() - start, 2),
            "problem": errors[0] if errors else "" if counts or tool == "plain" else " | ".join(lines[-2:])[:300]}


def run_all(options, tasks, results, end):
    """Runs tasks in parallel, in order."""
    waiting = queue.Queue()
    for task in tasks:
        waiting.put(task)

    def work(slot):
        while time.monotonic() < end:
            try:
                task = waiting.get_nowait()
            except queue.Empty:
                return
            results.append(run(options, slot, *task, end))

    threads = [threading.Thread(target=work, args=(slot,)) for slot in range(options.jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def tables(faults, results):
    """Returns the tables in Markdown."""
    runs = {(r["kernel"], r["fault"], r["tool"]): r for r in results}
    out = []
    correct = [r for r in results if r["fault"] == "Correct"]
    out.append("## Correct versions\n\n| tool | kernels | reports | results |\n|---|---|---|---|")
    for tool in ["plain", *TOOLS]:
        of = [r for r in correct if r["tool"] == tool]
        reports = "; ".join(f"{r['kernel']}: {r['report']}" for r in of if r["found"]) or "none"
        outcomes = ", ".join(f"{n} {k}" for k, n in collections.Counter(r["result"] for r in of).items())
        out.append(f"| {tool} | {len(of)} | {reports} | {outcomes} |")
    columns = ["plain", *TOOLS]
    out.append("\n## Faults found, by what the emulator reports\n")
    out.append("| place | the emulator reports | planted | emulator | " + " | ".join(TOOLS) +
               " | any tool | wrong, hang or error without a tool | runs missing |\n|" + "---|" * (8 + len(TOOLS)))
    groups = collections.OrderedDict()
    for fault in faults:
        groups.setdefault((fault[0], fault[3]), []).append(fault)
        groups.setdefault((fault[0], "all"), []).append(fault)
    for (place, kind), of in sorted(groups.items(), key=lambda item: (item[0][0], item[0][1] == "all")):
        found = collections.Counter()
        for _, kernel, name, _, _ in of:
            hits = [tool for tool in columns if runs.get((kernel, name, tool), {}).get("found")]
            found.update(hits)
            found["any"] += any(tool in TOOLS for tool in hits)
            found["missing"] += sum((kernel, name, tool) not in runs for tool in columns)
        emulator = sum(fault[3] != "Missed" for fault in of)
        row = [place, kind, len(of), emulator, *(found[tool] for tool in TOOLS), found["any"], found["plain"],
               found["missing"]]
        out.append("| " + " | ".join(map(str, row)) + " |")
    out.append("\n## Each fault\n\n| kernel | fault | emulator | " + " | ".join(columns) + " | first report |\n|" +
               "---|" * (4 + len(columns)))
    for _, kernel, name, emulator, _ in faults:
        cells, first = [], ""
        for tool in columns:
            r = runs.get((kernel, name, tool))
            cells.append("not run" if r is None else r["result"] if tool == "plain" else
                         f"found ({r['count']})" if r["found"] else f"no report, {r['result']}")
            if r and r["found"] and tool != "plain" and not first:
                first = f"{tool}: {r['report']}"
        row = [kernel, name, emulator, *cells, first]
        out.append("| " + " | ".join(cell.replace("|", "\\|")[:160] for cell in row) + " |")
    problems = collections.Counter((r["tool"], r["problem"]) for r in results if r["problem"] and r["result"] != "hang")
    out.append("\n## Problems of the tools\n")
    out.extend(f"- {n} runs of {tool}: {text}" for (tool, text), n in problems.most_common(20))
    return "\n".join(out) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("output")
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--sanitizer", default="compute-sanitizer")
    options = parser.parse_args()
    options.program = os.path.abspath(options.program)
    end = time.monotonic() + options.seconds
    listed = subprocess.run([options.program, "list"], capture_output=True, text=True, check=True).stdout
    faults = [line.split("\t") for line in listed.splitlines()]
    kernels = list(dict.fromkeys(fault[1] for fault in faults))
    results = []

    def phase(name, tasks):
        start = time.monotonic()
        run_all(options, tasks, results, end)
        print(f"{name}: {len(tasks)} runs in {time.monotonic() - start:.1f} s", flush=True)
        with open(options.output + ".json", "w") as file:
            json.dump(results, file, indent=0)
        with open(options.output + ".md", "w") as file:
            file.write(tables(faults, results))

    phase("correct versions", [(tool, kernel, "Correct") for tool in ["plain", *TOOLS] for kernel in kernels])
    phase("without a tool", [("plain", kernel, name) for _, kernel, name, _, _ in faults])
    hangs = {(r["kernel"], r["fault"]) for r in results if r["tool"] == "plain" and r["result"] in ("hang", "killed")}
    # The faults within a block come first: the tools find more of them, if the time does not suffice for all.
    order = sorted(faults, key=lambda fault: fault[0] == "between")
    tasks = [(tool, kernel, name) for _, kernel, name, _, _ in order for tool in TOOLS]
    phase("with tools", [task for task in tasks if task[1:] not in hangs])
    phase("with tools, faults that hang", [task for task in tasks if task[1:] in hangs])
    with open(options.output + ".md") as file:
        print(file.read().split("\n## Each fault")[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
