#!/usr/bin/env python3
"""The trainer on a GPU against itself on the CPU: the same losses within rounding, a resumed run bit for bit, the same texts
and choices of its model, and one sentence for each way in which a GPU cannot be used.

On a GPU machine the ordinary trainer is tested; without one `make test-simt` gives a trainer whose GPU is the emulation of
tests/simt, which can also be made to lack what a GPU may lack (SIMT_DEVICE). Skipped where the trainer has no GPU code."""
import os
import re
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from check import check, end, skip, test  # noqa: E402
from trainer_runs import ROOT, log_values, read_log, train, write_corpus  # noqa: E402

TINY = "--layers 1 --heads 2 --dim 16 --seq 16 --batch 2 --warmup 0 --lr 1e-2 --eval-tokens 64".split()

# Largest difference of a loss from the CPU's, in nats. Seen: 1e-6 in fp32, 5e-3 in bf16; with --tf32 4e-7 under the
# emulation, whose cuBLAS does not round factors: the bound is an eighth of bf16's, as TF32's unit is.
BOUNDS = {"fp32": 1e-5, "bf16": 2e-2, "tf32": 2.5e-3}


def run(data, out, *options, env=None, deterministic=True):
    """A run of the tiny model; returns (status, stdout, stderr)."""
    return train("--data", data, "--out", out, *TINY, *(["--deterministic"] if deterministic else []), *options, env=env)


def losses(out):
    """The numbers of a run's log that are losses."""
    return [line[key] for line in read_log(out) for key in ("loss", "val_loss") if key in line]


def test_losses(data, work):
    with test("three updates on the CPU"):
        status, _, errors = run(data, f"{work}/cpu", "--device", "cpu", "--steps", 3, "--eval-every", 3)
        check(status == 0, f"ended with {status}: {errors}")
    expected = losses(f"{work}/cpu")
    for dtype in ("fp32", "bf16"):
        for graph in ("", "--no-graph"):
            with test(f"three updates in {dtype} {graph or 'with recordings'} have the CPU's losses"):
                status, text, errors = run(data, f"{work}/{dtype}{graph}", "--device", "cuda", "--dtype", dtype,
                                           "--steps", 3, "--eval-every", 3, *graph.split())
                check(status == 0, f"ended with {status}: {errors}")
                check(f"cuda_{dtype}" in text, f"the device is not named: {text}")
                got = losses(f"{work}/{dtype}{graph}")
                check(len(got) == len(expected) == 5, f"{len(got)} losses, expected 3 and 2 evaluations")
                worst = max(abs(a - b) for a, b in zip(got, expected))
                check(worst <= BOUNDS[dtype], f"off by {worst:.2e} nats, allowed {BOUNDS[dtype]:.0e}: {got}, not {expected}")
        with test(f"recordings change no bit in {dtype}"):
            check(log_values(f"{work}/{dtype}") == log_values(f"{work}/{dtype}--no-graph"), "the logs differ")
        # The emulated library then offers three algorithms for each product, of which the first refuses to run: it is not
        # enough to take that.
        with test(f"three updates in {dtype}, the fastest products found by trying, have the CPU's losses"):
            status, _, errors = run(data, f"{work}/{dtype}-tried", "--device", "cuda", "--dtype", dtype, "--steps", 3,
                                    "--eval-every", 0, env={"SIMT_CUBLASLT_DELAYS": "-1,1,0"}, deterministic=False)
            check(status == 0, f"ended with {status}: {errors}")
            got, wanted = ([line["loss"] for line in read_log(f"{work}/{out}") if "loss" in line]
                           for out in (f"{dtype}-tried", "cpu"))
            worst = max(abs(a - b) for a, b in zip(got, wanted))
            check(len(got) == 3 and worst <= BOUNDS[dtype], f"{len(got)} losses, off by {worst:.2e} nats, allowed "
                  f"{BOUNDS[dtype]:.0e}")


def test_tf32(data, work):
    common = ["--device", "cuda", "--steps", 3, "--eval-every", 3]
    with test("TF32 attention without --tf32: one sentence, and the list says so"):
        _, listed, _ = run(data, f"{work}/listed", *common, "--list-attention")
        if not re.search(r"^flash_tf32 .* no .*--tf32", listed, re.M):
            skip(f"no flash_tf32 for this GPU: {listed}")
        status, _, errors = run(data, f"{work}/plain", *common, "--attention", "flash_tf32")
        check(status == 2 and "which --tf32 has to allow" in errors and len(errors.splitlines()) == 1, status, errors)
        for option, kernel in ((), "flash_tf32x3"), (("--tf32",), "flash_tf32"):
            status, text, errors = run(data, f"{work}/{kernel}", *common, *option)
            check(status == 0 and f"attention {kernel}: " in text, f"{option}: {status}, {text}{errors}, expected {kernel}")
        _, listed, _ = run(data, f"{work}/listed", *common, "--tf32", "--list-attention")
        check(re.search(r"^flash_tf32 +cuda +ok ", listed, re.M), listed)
        worst = max(abs(a - b) for a, b in zip(losses(f"{work}/flash_tf32"), losses(f"{work}/cpu")))
        check(0 < worst <= BOUNDS["tf32"], f"off by {worst:.2e} nats, allowed {BOUNDS['tf32']:.0e}")


def test_resume(data, work):
    with test("a run that stops and resumes is the one that does not, bit for bit"):
        whole, parts = f"{work}/whole", f"{work}/parts"
        for out, options in ((whole, ()), (parts, ("--stop", 2))):
            status, _, errors = run(data, out, "--device", "cuda", "--steps", 4, "--save-every", 2, *options)
            check(status == 0, f"ended with {status}: {errors}")
        check(len(read_log(parts)) < len(read_log(whole)), "the first part did not stop")
        status, _, errors = train("--out", parts, "--resume")
        check(status == 0, f"the second part ended with {status}: {errors}")
        check(log_values(whole) == log_values(parts), f"{log_values(whole)} became {log_values(parts)}")


def words_of(text, pattern):
    """The words of the first line that matches, as they stand there."""
    found = re.search(pattern, text, re.M)
    return found.groups() if found else ()


def test_reading(data, work):
    model = f"{work}/cpu/step_00000003"
    common = ["generate", "--init", model, "--prompt", "a", "--tokens", 24, "--show", "tokens", "--no-stop"]
    for name, options in (("the likeliest tokens", ("--temperature", 0)), ("three texts", ("--samples", 3))):
        with test(f"generate: {name} are the CPU's, within the context and beyond it, with the cache and without"):
            expected = train(*common, *options, "--device", "cpu")
            for more in ((), ("--no-cache",)):
                status, text, errors = train(*common, *options, "--device", "cuda", *more)
                check(status == 0 and text == expected[1] != "", f"{more}: {text}, CPU {expected[1]}: {errors}")
    with test("generate in bf16 writes as many tokens"):
        status, text, errors = train(*common, "--samples", 2, "--device", "cuda", "--dtype", "bf16")
        check(status == 0 and [len(line.split()) for line in text.splitlines()] == [25, 25], text, errors)
    with test("evaluate: loss and choices are the CPU's"):
        made = subprocess.run([sys.executable, os.path.join(ROOT, "dev", "hellaswag.py"), "--made-up", "12", "--vocab", "97",
                               "--longest", "17", "--out", f"{work}/made.bin"], capture_output=True, text=True)
        check(made.returncode == 0, made.stderr)
        common = ["evaluate", "--init", model, "--data", data, "--hellaswag", f"{work}/made.bin"]
        loss, score = r"^loss +([\d.]+) nats", r"^hellaswag (\d+) examples: acc_norm \S+ \((\d+) right.* \((\d+) by"
        _, expected, _ = train(*common, "--device", "cpu")
        for dtype in ("fp32", "bf16"):
            status, text, errors = train(*common, "--device", "cuda", "--dtype", dtype)
            check(status == 0 and words_of(text, score)[:1] == ("12",), text, errors)
            got, wanted = (float(words_of(said, loss)[0]) for said in (text, expected))
            check(abs(got - wanted) <= BOUNDS[dtype], f"{dtype}: {got}, CPU {wanted}")
            if dtype == "fp32":
                check(words_of(text, score) == words_of(expected, score), text, expected)


def test_refusals(data, work, emulated):
    cases = [
        ("a GPU that is not there", ["--device", "cuda:77"], {}, 1, "--device cuda:77: this machine has"),
        ("a kernel that is not there", ["--device", "cuda", "--attention", "nothing"], {}, 2, "nothing"),
        ("a batch that does not fit", ["--device", "cuda", "--batch", 1 << 24], {}, 1, "would fit"),
    ]
    if emulated:
        cases += [
            ("no GPU", ["--device", "cuda"], {"SIMT_DEVICE": "none"}, 1, "no GPU is visible"),
            ("an old driver", ["--device", "cuda"], {"SIMT_DEVICE": "old-driver"}, 1,
             "the GPU driver supports CUDA 12.0, but"),
            ("another architecture", ["--device", "cuda"], {"SIMT_DEVICE": "other-arch"}, 1, "but the binary was built for"),
            ("bf16 before sm_80", ["--device", "cuda", "--dtype", "bf16"], {"SIMT_DEVICE": "sm_75"}, 1,
             "needs a GPU of sm_80"),
        ]
    for number, (name, options, env, expected, words) in enumerate(cases):
        with test(f"{name}: one sentence"):
            status, _, errors = run(data, f"{work}/refused{number}", *options, "--steps", 1, env=env)
            check(status == expected, f"status {status}, expected {expected}")
            check(errors.startswith("train_gpt: ") and words in errors and len(errors.splitlines()) == 1,
                  f"got {errors!r}, expected '{words}'")
            check(not os.path.exists(f"{work}/refused{number}/log.jsonl"), "a log was begun")
    if emulated:
        with test("--device auto takes the CPU where there is no GPU"):
            status, text, errors = run(data, f"{work}/auto", "--steps", 1, env={"SIMT_DEVICE": "none"})
            check(status == 0 and "cpu_fp32" in text, f"status {status}: {text}{errors}")


def main():
    with tempfile.TemporaryDirectory() as work:
        data = write_corpus(f"{work}/data")
        text = ""
        with test("the trainer runs on a GPU"):
            status, text, errors = run(data, f"{work}/first", "--device", "cuda", "--steps", 1)
            if status and any(words in errors for words in ("built for the CPU only", "no GPU", "no NVIDIA driver")):
                text = ""
                skip(f"no GPU kernel ran: {errors.strip()}")
            check(status == 0, f"ended with {status}: {errors}")
        if text:
            test_losses(data, work)
            test_tf32(data, work)
            test_resume(data, work)
            test_reading(data, work)
            test_refusals(data, work, "SIMT emulation" in text)
    end()


if __name__ == "__main__":
    main()
