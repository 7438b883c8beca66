"""``python -m bench``: the command line of the benchmark."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import uvloop

from bench import late, profiling, report
from bench.engine import Kind
from bench.measure import CASES, LATE_CASES
from bench.run import SYSTEMS, Plan, run
from bench.systems import Launch


def main() -> int:
    """Run what the command line asks for; returns 1 when a system answered wrongly."""
    options = _parser().parse_args()
    if options.markdown:
        print(report.markdown(report.newest()))
        return 0
    cases = [case for case in CASES + LATE_CASES if case.name in options.case] if options.case else list(CASES)
    concurrencies = options.concurrency or [1, 32]
    if options.profile:
        case = cases[0]
        print(uvloop.run(profiling.profile(case, concurrencies[-1], options.seconds)))
        return 0
    rounds = options.rounds or (2 if options.quick else 5)
    share = 0.2 if options.quick else 1.0
    if options.late:
        result = uvloop.run(run(late.plan(options.case, concurrencies, rounds, share)))
        path = report.save(result, "late-")
    else:
        systems = [system for system in SYSTEMS if not options.system or system.name in options.system]
        if options.against:
            systems.append(_other(options.against))
        result = uvloop.run(run(Plan(cases, systems, concurrencies, rounds, share)))
        path = report.save(result)
    print(report.table(result))
    if options.late:
        print(late.summary(result))
    print(f"written to {path}")
    return int(any(cell["problems"] for cell in result["cells"]))


def _other(checkout: Path) -> Launch:
    """The gateway of another checkout. The cases of vLLM's HTTP workers are left to ours."""
    only = frozenset(case.name for case in CASES if case.kind is not Kind.VLLM)
    return Launch(name="pd-extproc-other", checkout=checkout.resolve(), only=only)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench", description="CPU per request of pd-extproc beside a plain Envoy proxy and the peer gateway smg."
    )
    parser.add_argument("--quick", action="store_true", help="about two minutes: fewer requests, two rounds")
    parser.add_argument(
        "--case", action="append", choices=[case.name for case in CASES + LATE_CASES], help="repeatable; default all"
    )
    parser.add_argument(
        "--system", action="append", choices=[system.name for system in SYSTEMS], help="repeatable; default all"
    )
    parser.add_argument("--concurrency", action="append", type=int, choices=[1, 32], help="repeatable; default both")
    parser.add_argument("--rounds", type=int, help="default 5, with --quick 2")
    parser.add_argument("--markdown", action="store_true", help="print the README's table from the newest result")
    parser.add_argument("--profile", action="store_true", help="say where the sidecar's time goes in one case")
    parser.add_argument("--late", action="store_true", help="what late answers cost, instead of the cases")
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="also measure another checkout's pd-extproc")
    parser.add_argument("--seconds", type=int, default=15, help="with --profile: how long to sample")
    return parser


if __name__ == "__main__":
    sys.exit(main())
