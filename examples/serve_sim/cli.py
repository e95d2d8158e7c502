"""Arguments of the simulator, with smaller defaults on the CPU, and the run that they ask for."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import pgqa

from .engine import EngineConfig
from .ledger import WrongOutput
from .report import plot, print_summary
from .simulation import Simulation, SimulationConfig
from .workload import TRACES, WorkloadConfig

# What differs by device; the CPU's run ends within a minute on two cores.
DEFAULTS = {
    "cuda": dict(dtype="bfloat16", query_heads=32, kv_heads=8, head_dim=128, max_batch=32, max_tokens=8192),
    "cpu": dict(dtype="float32", query_heads=8, kv_heads=2, head_dim=64, max_batch=8, max_tokens=4096),
}
POOL_SHARE = 0.8  # of the pages that max_batch requests of mean length want, so that pages run out now and then


def check_interval(text: str) -> int:
    """0 for none, 1 for every, else the number."""
    words = {"none": 0, "every": 1}
    return words[text] if text in words else int(number(int, 1)(text))


def number(kind: Callable[[str], float], least: float, most: float = math.inf) -> Callable[[str], float]:
    """A type for argparse that refuses what is no number from `least` to `most`."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"got {text}, expected a number from {least:g} to {most:g}")
        return value

    return parse


def make_parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    count, fraction = number(int, 1), number(float, 0, 1)
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    add("--steps", type=count, default=300)
    add("--check", type=check_interval, default=1, metavar="every|N|none", help="steps whose output is checked")
    add("--padding", choices=("live", "rows"), default="live",
        help="requests that are not there: told as the live batch, or empty rows of the table")  # fmt: skip
    add("--trace", choices=tuple(TRACES), default="conversation", help="median lengths of prompts and outputs")
    add("--sigma", type=number(float, 0, 4), default=1.0,
        help="of the log-normal lengths, default 1: the mean is 1.65 times the median")  # fmt: skip
    add("--rate", type=number(float, 0), help="arrivals a step; default: what keeps max-batch requests running")
    add("--backlog", type=number(int, 0), help="requests that wait at the start; default: max-batch")
    add("--shared", type=fraction, default=0.3, help="share of the requests that begin with a system prompt")
    add("--system-prompts", type=count, default=3)
    add("--system-prompt-tokens", type=number(int, 0), default=200)
    add("--pages", type=count, help=f"default: {POOL_SHARE:g} of what max-batch requests of mean length want")
    add("--page-size", type=count, default=16)
    for name in ("query-heads", "kv-heads", "head-dim", "max-batch"):
        add(f"--{name}", type=count)
    add("--max-tokens", type=number(int, 2), help="prompt and output of a request together; longer ones are cut")
    add("--dtype", choices=("float16", "bfloat16", "float32"), help="float32 on the CPU only")
    add("--seed", type=int, default=0)
    add("--plot", default="serve_sim.png", metavar="FILE", help='PNG of the steps; "": none')
    return parser


def make_config(arguments: argparse.Namespace) -> SimulationConfig:
    """Fills in the defaults that depend on the device and on each other."""
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    chosen = {name: getattr(arguments, name) or value for name, value in DEFAULTS[device].items()}
    trace, page_size, max_batch = TRACES[arguments.trace], arguments.page_size, chosen["max_batch"]
    mean = math.exp(arguments.sigma**2 / 2)
    mean_tokens = min(chosen["max_tokens"], (trace.prompt + trace.output) * mean)
    pages = arguments.pages or max(
        math.ceil(POOL_SHARE * max_batch * mean_tokens / page_size), -(-chosen["max_tokens"] // page_size)
    )
    system_pages = arguments.system_prompt_tokens // page_size
    engine = EngineConfig(
        chosen["query_heads"], chosen["kv_heads"], chosen["head_dim"], page_size, getattr(torch, chosen["dtype"]),
        max_batch, pages, pages + (max_batch - 1) * system_pages, arguments.padding == "rows",
    )  # fmt: skip
    workload = WorkloadConfig(
        trace, arguments.sigma, max_batch / (trace.output * mean) if arguments.rate is None else arguments.rate,
        max_batch if arguments.backlog is None else arguments.backlog, chosen["max_tokens"], arguments.shared,
        arguments.system_prompts, arguments.system_prompt_tokens, arguments.seed,
    )  # fmt: skip
    return SimulationConfig(engine, workload, device, arguments.steps, arguments.check)


def refusals(config: SimulationConfig) -> list[str]:
    """Why a run can not begin: what the device, the pool or pgqa does not take."""
    if config.device == "cuda" and not torch.cuda.is_available():
        return ["--device: got cuda, but torch finds no GPU"]
    engine = config.engine
    needed = -(-config.workload.max_tokens // engine.page_size)
    if engine.num_pages < needed:
        return [f"--pages: got {engine.num_pages}, expected {needed} or more for --max-tokens"]
    return pgqa.supports_shape(
        device=config.device, dtype=engine.dtype, num_query_heads=engine.query_heads, num_kv_heads=engine.kv_heads,
        head_dim=engine.head_dim, page_size=engine.page_size,
    )  # fmt: skip


def main(description: str, argv: Sequence[str] | None = None) -> int:
    parser = make_parser(description)
    arguments = parser.parse_args(argv)
    config = make_config(arguments)
    if arguments.plot and not Path(arguments.plot).absolute().parent.is_dir():
        parser.error(f"--plot: got {arguments.plot}, expected a file in a folder that exists")
    for reason in refusals(config):
        parser.error(reason)
    try:
        result = Simulation(config).run()
    except WrongOutput as error:
        print(f"wrong output: {error}", file=sys.stderr)
        return 1
    print_summary(config, result)
    if arguments.plot:
        plot(result.records, arguments.plot)
    return 1 if result.memory_grew else 0
