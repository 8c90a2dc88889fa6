#!/usr/bin/env python3
"""What limits an attention kernel: the GPU's counters of ours and PyTorch's, side by side.

    python3 dev/attention_counters.py [--shape B,NH,T,HS[,packed]]... [--dtype bf16|fp32] [--kernels a,b] [--peers a,b]
                                      [--out FILE]

Runs forward and backward of each once under Nsight Compute (ncu has to be on the PATH, and may need rights to read
counters), warm, at the clocks as they are, and writes a line a kernel launch as CSV (dev/results/<gpu>/
attention_counters.csv unless --out names a file):

    tensor, exp, shared, issue   how busy they are while the kernel runs, in % of what they can do: the tensor pipe, the unit
                                 of the exponentials (XU), shared memory's data pipe, the issue of instructions
    conflicts                    % of shared memory's wavefronts that bank conflicts added
    warps                        % of the warps that an SM can hold
    registers, KB                of a thread; of shared memory of a block

Exit status: 0; 1 what stopped it, in one sentence; 2 wrong arguments.
"""
import argparse
import csv
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile

import bench
import bench_attention

# Column, metric, factor.
METRICS = (
    ("ms", "gpu__time_duration.sum", 1e-6),
    ("tensor", "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active", 1),
    ("exp", "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active", 1),
    ("shared", "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_active", 1),
    ("issue", "sm__issue_active.avg.pct_of_peak_sustained_active", 1),
    ("warps", "sm__warps_active.avg.pct_of_peak_sustained_active", 1),
    ("registers", "launch__registers_per_thread", 1),
    ("KB", "launch__shared_mem_per_block", 1 / 1024),
)
CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum", "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"
COLUMNS = ["operator", "way", "kernel", "B", "NH", "T", "HS", "dtype", "layout", *(name for name, *_ in METRICS),
           "conflicts"]
MARK = "spin_kernel"  # of torch.cuda._sleep: stands between the launches of one call and the next


def run_operators(options):
    """Under ncu: each operator's forward and backward, once to warm up and once with the counters on, behind a mark. Writes
    which calls these were, in their order, to the file of --child."""
    import torch
    calls = []
    for shape in options.shapes:
        tensors = bench_attention.make_tensors(shape, "cuda")
        makers = [(name, lambda name=name: bench_attention.Ours(name, tensors)) for name in options.kernels]
        makers += [(name, lambda name=name: bench_attention.Peer(name, bench_attention.PEERS["cuda"][name], tensors))
                   for name in options.peers]
        for name, make in makers:
            try:
                with torch.no_grad():
                    subject = make()
                    subject.both()
                torch.cuda.synchronize()
            except (RuntimeError, ValueError) as error:
                print(f"{name}: {bench_attention.first_line(error)}", file=sys.stderr)
                continue
            for way in ("forward", "backward"):
                torch.cuda.profiler.start()
                torch.cuda._sleep(1)
                with torch.no_grad():
                    getattr(subject, way)()
                torch.cuda.synchronize()
                torch.cuda.profiler.stop()
                calls.append({"operator": subject.name, "way": way, **shape._asdict()})
    with open(options.child, "w") as file:
        json.dump(calls, file)


def read_counters(text, calls):
    """ncu's raw CSV -> rows, a launch each, of these calls."""
    lines = text.splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if first is None:
        raise bench_attention.Fault("ncu gave no counters" + (f": {lines[-1]}" if lines else ""))
    rows, call = [], -1
    for launch in list(csv.DictReader(lines[first:]))[1:]:  # the first holds the units
        if MARK in launch["Kernel Name"]:
            call += 1
            continue
        if not 0 <= call < len(calls):
            raise bench_attention.Fault(f"ncu saw {launch['Kernel Name']} outside of the {len(calls)} calls")

        def value(metric):
            try:
                return float(launch[metric].replace(",", ""))
            except (KeyError, ValueError):
                return math.nan
        row = {**calls[call], "kernel": short_name(launch["Kernel Name"])}
        row["layout"] = "packed" if row.pop("packed") else "heads"
        row.update((name, f"{value(metric) * factor:.4g}") for name, metric, factor in METRICS)
        row["conflicts"] = f"{100 * value(CONFLICTS[0]) / max(value(CONFLICTS[1]), 1):.3g}"
        rows.append(row)
    return rows


def short_name(kernel):
    """A kernel's name without namespaces, return type and arguments."""
    kernel = re.sub(r"<unnamed>::|\(anonymous namespace\)::|^void ", "", kernel)
    return re.split(r"[(<]", kernel)[0][:60]


def parse_options(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", dest="shapes", action="append", type=bench_attention.parse_shape,
                        metavar="B,NH,T,HS[,packed]", help="default: 16,12,1024,64,packed and 4,16,4096,128")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--kernels", default="flash_mma", metavar="NAME,...", help="of the table, or paths of .so files")
    parser.add_argument("--peers", default="flash,cudnn", metavar="NAME,...",
                        help=f"of {', '.join(bench_attention.PEERS['cuda'])}; '' for none")
    parser.add_argument("--out", metavar="CSV", help="default: dev/results/<gpu>/attention_counters.csv")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    shapes = options.shapes or [bench_attention.parse_shape(text) for text in ("16,12,1024,64,packed", "4,16,4096,128")]
    options.shapes = [shape._replace(dtype=options.dtype) for shape in shapes]
    options.kernels = [name for name in options.kernels.split(",") if name]
    options.peers = [name for name in options.peers.split(",") if name]
    for name in options.peers:
        if name not in bench_attention.PEERS["cuda"]:
            parser.error(f"--peers: got '{name}', expected some of {', '.join(bench_attention.PEERS['cuda'])}")
    return options


def main(arguments):
    options = parse_options(arguments)
    bench_attention.need_torch()
    if options.child:
        run_operators(options)
        return 0
    if not shutil.which("ncu"):
        print("attention_counters.py: no ncu on the PATH; it comes with the CUDA Toolkit (Nsight Compute)", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        calls = os.path.join(folder, "calls")
        command = ["ncu", "--clock-control", "none", "--profile-from-start", "off", "--csv", "--page", "raw",
                   "--print-units", "base", "--metrics", ",".join([*(metric for _, metric, _ in METRICS), *CONFLICTS]),
                   sys.executable, os.path.abspath(__file__), *arguments, "--child", calls]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        try:
            if not os.path.exists(calls):
                raise bench_attention.Fault("the run under ncu failed" + "".join(done.stdout.strip().splitlines()[-1:]))
            with open(calls) as file:
                rows = read_counters(done.stdout, json.load(file))
        except bench_attention.Fault as fault:
            print(f"attention_counters.py: {fault}", file=sys.stderr)
            return 1
    for row in rows:
        print(f"{row['operator']:16} {row['way']:9} HS {row['HS']:<4} {row['kernel']:36.36} {row['ms']:>7} ms  tensor "
              f"{row['tensor']:>5}%  exp {row['exp']:>5}%  shared {row['shared']:>5}%  issue {row['issue']:>5}%  warps "
              f"{row['warps']:>5}%")
    out = options.out or bench.results_path(bench.machine_name("cuda"), "attention_counters.csv")
    head = bench.header(bench.machine_words("cuda"), "what limits attention: counters of ncu, by launch, % of the peak "
                        "while active; conflicts: % of the wavefronts")
    try:
        bench_attention.write_csv(out, head, COLUMNS, rows)
    except bench_attention.Fault as fault:
        print(f"attention_counters.py: {fault}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
