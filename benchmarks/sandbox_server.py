"""Measures the latency of good clients of the verification server, alone and beside hostile clients.

    PYTHONPATH=tests python benchmarks/sandbox_server.py [--requests 600] [--clients 2] [--pause-ms 50]

Starts `penstock sandbox serve` with 2 workers. Good clients call from 127.0.0.1, one request after the other
with a pause; hostile clients (tests/stages/hostile_clients.py) from 127.0.0.2 hold connections and bodies, send
garbage and leave early, and from 127.0.0.3 hand in programs that spin, print, fork, and forge. Prints p50 and
p99 of both rounds, and ends with 1 if a verdict was wrong.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

from stages.hostile_clients import HostileClients


def good_client(port: int, number: int, requests: int, pause_s: float) -> list[tuple[float, bool]]:
    """Return latency and rightness of each verdict; every third submission is a wrong one."""
    seen = []
    for index in range(requests):
        expected = index % 3 > 0
        answer = index if expected else index + 1
        body = {
            "in_outs": {"inputs": [str(index)], "outputs": [str(answer)]},
            "generation": "print(input())",
            "timeout": 20,
        }
        link = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        headers = {"Content-Type": "application/json"}
        started = time.perf_counter()
        link.request("POST", "/check_correctness", json.dumps(body), headers)
        reply = link.getresponse()
        fields = json.loads(reply.read())
        seen.append((time.perf_counter() - started, fields.get("result") == [int(expected)]))
        link.close()
        time.sleep(pause_s)
    return seen


def measure(port: int, options: argparse.Namespace) -> tuple[float, float, int]:
    """Return p50 and p99 in ms, and the number of wrong verdicts, of all good clients."""
    with ThreadPoolExecutor(options.clients) as threads:
        share, pause_s = options.requests // options.clients, options.pause_ms / 1000
        jobs = [
            threads.submit(good_client, port, number, share, pause_s)
            for number in range(options.clients)
        ]
        seen = [one for job in jobs for one in job.result()]
    times = sorted(took * 1000 for took, _ in seen)
    wrong = sum(not right for _, right in seen)
    return times[len(times) // 2], times[int(len(times) * 0.99)], wrong


_hostile: list[HostileClients] = []  # in a process of their own, so that they slow no measurement


def start_hostile(port: int, options: argparse.Namespace) -> None:
    # They stand for other machines, whose processors are not the server's: they get what it leaves.
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    _hostile.append(HostileClients(port, options.holders, options.submitters))


def hostile_so_far() -> int:
    return _hostile[0].submitted


def end_hostile() -> tuple[int, list[str]]:
    _hostile[0].stop()
    return _hostile[0].submitted, _hostile[0].passed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--pause-ms", type=float, default=50.0)
    parser.add_argument("--holders", type=int, default=40)
    parser.add_argument("--submitters", type=int, default=4)
    options = parser.parse_args()
    command = [sys.executable, "-m", "penstock.cli", "sandbox", "serve", "--port", "0"]
    server = subprocess.Popen([*command, "sandbox.workers=2"], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    found = re.search(r":(\d+) ", server.stdout.readline())
    assert found is not None
    port = int(found[1])
    try:
        print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        measure(port, argparse.Namespace(requests=10, clients=1, pause_ms=0))
        quiet = measure(port, options)
        print(
            f"quiet            p50 {quiet[0]:7.1f} ms   p99 {quiet[1]:7.1f} ms   wrong {quiet[2]}"
        )
        with ProcessPoolExecutor(1, initializer=start_hostile, initargs=(port, options)) as other:
            other.submit(hostile_so_far).result()
            beside = measure(port, options)
            submitted, passed = other.submit(end_hostile).result()
        print(
            f"beside hostile   p50 {beside[0]:7.1f} ms   p99 {beside[1]:7.1f} ms   wrong {beside[2]}"
        )
        print(
            f"p99 ratio {beside[1] / quiet[1]:.2f}, hostile programs judged {submitted}, ",
            end="",
        )
        print(f"of them passed {len(passed)}")
        sys.exit(1 if quiet[2] or beside[2] or passed else 0)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


if __name__ == "__main__":
    main()
