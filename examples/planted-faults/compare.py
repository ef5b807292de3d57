#!/usr/bin/env python3
"""Runs each planted fault on a GPU, alone and under each tool of compute-sanitizer, and prints which of them find it.

    compare.py PROGRAM OUTPUT [--seconds 150] [--jobs 16] [--sanitizer compute-sanitizer]

PROGRAM is the binary of examples/planted-faults. OUTPUT.json has the result of each run, and OUTPUT.md the tables. Runs that OUTPUT.json
already has are not repeated. The correct versions run first, then the faults without a tool, then the faults with each tool. Faults that hang without a tool come last. Faults for which the
time does not suffice are counted as missing.

A process runs one or more faults of a kernel. If a tool reports nothing for all of them, it has found none of them. Otherwise, each half
of them runs again in a process of its own: only the report for a single fault counts.
"""

import argparse
import collections
import json
import os
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
                  "--racecheck-deadlock-timeout", "1500", "--racecheck-continue-on-deadlock", "no"],
    "synccheck": [],
    "initcheck": [],
}
# Seconds until a process has started, and until it is stopped after it has reported a hang.
START, GRACE = 30.0, 0.5
REPORT = re.compile(r"^========= +(?!COMPUTE-SANITIZER|ERROR SUMMARY|RACECHECK SUMMARY|Internal)(\S.*)")
SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")


def run(options, slot, tool, kernel, faults, end):
    """Returns the output of a process that runs faults of a kernel, whether it was killed, and its time."""
    launches, hang = ("200", "2") if tool == "plain" else ("3", "4" if tool == "racecheck" else "3")
    command = [options.program, "run", kernel, ",".join(faults), launches]
    environment = dict(os.environ, POISON="1" if tool == "plain" else "0", HANG_SECONDS=hang)
    if tool != "plain":
        # Each process has its own ports: parallel ones could connect to each other's program.
        command = [options.sanitizer, "--tool", tool, "--check-exit-code", "no", "--launch-timeout", "60", "--port",
                   str(49152 + 16 * slot), "--show-backtrace", "device", *TOOLS[tool], *command]
    start = time.monotonic()
    with tempfile.TemporaryFile() as output:
        def printed():
            return os.pread(output.fileno(), 1 << 22, 0).decode(errors="replace")

        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                                   env=environment, start_new_session=True)
        stop = min(end, start + START + 3 * len(faults))
        while process.poll() is None and time.monotonic() < stop:
            time.sleep(0.05)
            if re.search("^hang$", printed(), re.M):
                stop = min(stop, time.monotonic() + GRACE)
        killed = process.poll() is None
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
        return printed(), killed, time.monotonic() - start


def outcomes(tool, kernel, faults, text, killed, seconds):
    """Returns the outcomes of faults, and lists of faults that must run again."""
    lines = text.splitlines()
    results = {}
    for line in lines:
        name, _, result = line.partition(" ")
        if name in faults and result in ("right", "wrong"):
            results[name] = result
    reports = [match[1] for line in lines if (match := REPORT.match(line))]
    counts = [int(match[1] or match[2]) for match in SUMMARY.finditer(text)]
    rest = [name for name in faults if name not in results]
    if rest:
        # The first fault without a result has ended the process.
        errors = [line for line in lines if line.startswith("error: ")]
        results[rest[0]] = "hang" if "hang" in lines else errors[-1] if errors else "killed" if killed else "ended"
    is_clean = not rest and counts and max(counts) == 0
    if tool == "plain":
        done, again = [name for name in faults if name in results], [rest[1:]] if rest[1:] else []
    elif len(faults) > 1 and not is_clean:
        return [], [faults[:len(faults) // 2], faults[len(faults) // 2:]]
    else:
        done, again = faults, []
    # A process that is killed prints no summary.
    count = max(counts, default=0) or (len(reports) if not counts else 0)
    internal = [line for line in lines if line.startswith("=========") and "Internal" in line]
    problem = internal[0] if internal else "" if counts or tool == "plain" else "no summary: " + " ".join(lines[-2:])[:200]
    return [{"kernel": kernel, "fault": name, "tool": tool, "result": results[name], "count": count,
             "found": results[name] not in ("right", "killed") if tool == "plain" else count > 0,
             "report": reports[0] if reports and tool != "plain" else "", "problem": problem, "together": len(faults),
             "seconds": round(seconds, 2)} for name in done], again


def run_all(options, tasks, results, end, jobs):
    """Runs tasks (tool, kernel, faults) in parallel, in order."""
    tasks, running, changed = collections.deque(tasks), [0], threading.Condition()

    def work(slot):
        while True:
            with changed:
                while not tasks and running[0]:
                    changed.wait()
                if not tasks or time.monotonic() > end:
                    return
                tool, kernel, faults = tasks.popleft()
                running[0] += 1
            done, again = [], []
            try:
                text, killed, seconds = run(options, slot, tool, kernel, faults, end)
                if not killed or time.monotonic() < end:
                    done, again = outcomes(tool, kernel, faults, text, killed, seconds)
            finally:
                with changed:
                    results.extend(done)
                    tasks.extend((tool, kernel, names) for names in again)
                    running[0] -= 1
                    changed.notify_all()

    threads = [threading.Thread(target=work, args=(slot,)) for slot in range(jobs)]
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
    if os.path.exists(options.output + ".json"):
        with open(options.output + ".json") as file:
            results = json.load(file)

    def phase(name, tasks, jobs=options.jobs):
        start, before = time.monotonic(), len(results)
        done = {(r["tool"], r["kernel"], r["fault"]) for r in results}
        tasks = [(tool, kernel, [n for n in names if (tool, kernel, n) not in done]) for tool, kernel, names in tasks]
        tasks = [task for task in tasks if task[2]]
        run_all(options, tasks, results, end, jobs)
        print(f"{name}: {len(results) - before} results in {time.monotonic() - start:.1f} s", flush=True)
        with open(options.output + ".json", "w") as file:
            json.dump(results, file, indent=0)
        with open(options.output + ".md", "w") as file:
            file.write(tables(faults, results))

    named = {kernel: [fault[2] for fault in faults if fault[1] == kernel] for kernel in kernels}
    phase("correct versions", [(tool, kernel, ["Correct"]) for tool in ["plain", *TOOLS] for kernel in kernels])
    phase("without a tool", [("plain", kernel, named[kernel]) for kernel in kernels])
    hangs = {(r["kernel"], r["fault"]) for r in results if r["tool"] == "plain" and r["result"] not in ("right", "wrong")}
    # The tools find more of the faults within a block, so these run alone, and first.
    places = {fault[1]: fault[0] for fault in faults}
    ending = {kernel: [name for name in named[kernel] if (kernel, name) not in hangs] for kernel in kernels}
    within = [kernel for kernel in kernels if places[kernel] == "within"]
    between = [kernel for kernel in kernels if places[kernel] == "between"]
    phase("within a block, with tools",
          [(tool, kernel, [name]) for kernel in within for name in ending[kernel] for tool in TOOLS])
    phase("between blocks, with tools",
          [(tool, kernel, ending[kernel]) for kernel in between if ending[kernel] for tool in TOOLS])
    # These wait for the GPU most of the time.
    phase("faults that hang or fail, with tools",
          [(tool, kernel, [name]) for kernel, name in sorted(hangs) for tool in TOOLS], 2 * options.jobs)
    with open(options.output + ".md") as file:
        print(file.read().split("\n## Each fault")[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
