#!/usr/bin/env python3
"""The trainer against its PyTorch twin, dev/reference.py: the same losses step by step, and `tiled` attention against
`reference`, in fp32 on the CPU. Also what both must share for that: order of windows, shard forms, start, schedules.

Needs PyTorch and numpy; where the running Python has none and /usr/bin/python3 does, it goes on with that one.
"""
import contextlib
import importlib.util
import io
import json
import os
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "..", "dev")]
from check import check, end, skip, test  # noqa: E402
from trainer_runs import ROOT, TRAIN, read_log, train, write_corpus, write_shard  # noqa: E402

NEEDED = ("torch", "numpy")
OTHER = "/usr/bin/python3"
if not all(map(importlib.util.find_spec, NEEDED)):
    found = os.path.exists(OTHER) and os.path.realpath(OTHER) != os.path.realpath(sys.executable) and \
        subprocess.run([OTHER, "-c", "import " + ", ".join(NEEDED)], stderr=subprocess.DEVNULL).returncode == 0
    if found:
        os.execv(OTHER, [OTHER, __file__])
    with test("the trainer against PyTorch"):
        skip("no Python with PyTorch and numpy")
    end()

# Threads that spin while they wait lose all their time to each other where other programs use the cores too.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy  # noqa: E402
import torch  # noqa: E402
import reference  # noqa: E402

# Largest difference in any step, absolute. Seen over 100 steps of four layers: 6e-6, 6e-7 and 3e-4.
BOUND = {"loss": 1e-4, "val_loss": 1e-4, "grad_norm": 1e-3}
FOLDER = tempfile.TemporaryDirectory()
SMALL = "--layers 2 --heads 2 --dim 32 --seq 16 --batch 4".split()
FOUR_LAYERS = ("--layers 4 --heads 4 --dim 64 --seq 64 --batch 4 --lr 2e-3 --warmup 10 --eval-every 25 "
               "--eval-tokens 2048").split()


def path(*names):
    return os.path.join(FOLDER.name, *names)


def run_trainer(name, *options):
    """Trains with train_gpt into a folder of that name; returns its path."""
    status, output, errors = train(*options, "--out", path(name), "--device", "cpu", "--save-every", 0)
    check(status == 0, f"train_gpt ended with {status}: {errors or output[-500:]}")
    return path(name)


def run_twin(name, *options):
    """The same with dev/reference.py; returns its path."""
    status, errors = call_twin(*options, "--out", path(name))
    check(status == 0, f"reference.py ended with {status}: {errors}")
    return path(name)


def call_twin(*options):
    """Exit status and error output of dev/reference.py, run in this process: to import PyTorch anew takes seconds."""
    errors = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        status = reference.main(["--device", "cpu", *map(str, options)])
    return status, errors.getvalue()


def start(name, *options):
    """The initial checkpoint of a run, made by train_gpt."""
    return os.path.join(run_trainer(name, *options, "--steps", 0, "--save-every", 1), "step_00000000")


def largest_differences(left, right):
    """For each key of the bounds, the largest |difference| over the steps of either log, which must be the same steps."""
    logs = [{(line["step"], key): line[key] for line in read_log(run) for key in BOUND if key in line}
            for run in (left, right)]
    check(logs[0].keys() == logs[1].keys(), f"{left} and {right} log other steps: {len(logs[0])} and {len(logs[1])} values")
    differences = {key: 0.0 for key in BOUND}
    for step, key in logs[0].keys() & logs[1].keys():
        difference = abs(logs[0][step, key] - logs[1][step, key])
        differences[key] = max(differences[key], difference if difference == difference else float("inf"))
    return differences


def check_equal(left, right, steps):
    for key, difference in largest_differences(left, right).items():
        check(difference <= BOUND[key], f"{key} differs by {difference:.2e}, allowed {BOUND[key]:.0e}")
    losses = [line["loss"] for line in read_log(left) if "loss" in line]
    check(len(losses) == steps, f"{len(losses)} steps are logged, expected {steps}")
    check(losses[-1] < losses[0], f"the loss goes from {losses[0]} to {losses[-1]}: nothing was learnt, nothing was tested")


# --- what both must share -------------------------------------------------------------------------------------------------

def test_order():
    with test("order of windows: published vectors"):
        check(reference.mix(0) == 16294208416658607535 and reference.mix(2 ** 64 - 1) == 16490336266968443936, "mix")
        for (seed, epoch, i, n), expected in {
                (0, 0, 0, 1): 0, (1337, 1, 0, 5): 2, (1, 0, 0, 88): 20, (1, 3, 87, 88): 74,
                (2 ** 64 - 1, 7, 12345, 1000003): 141126, (42, 2, 999999999, 10 ** 12): 181504408045,
                (42, 2 ** 40, 10 ** 14, 10 ** 15): 397006567999951}.items():
            got = reference.order(seed, epoch, i, n)
            check(got == expected, f"order({seed}, {epoch}, {i}, {n}) is {got}, expected {expected}")
        got = [reference.order(7, 0, i, 17) for i in range(17)]
        check(got == [10, 14, 12, 2, 3, 7, 4, 8, 0, 6, 13, 11, 5, 15, 9, 1, 16], "order of 17 windows is", got)
        got = reference.shard_shifts(1337, 1, [0, 1, 15, 1000])
        check(got == [0, 0, 6, 12], "shifts are", got)
        check(reference.shard_shifts(1337, 0, [9, 9]) == [0, 0], "epoch 0 is shifted")
    with test("order of windows: a permutation of any number"):
        for n in list(range(1, 70)) + [255, 256, 257, 1000]:
            check(sorted(reference.order(5, 1, i, n) for i in range(n)) == list(range(n)), f"n {n} is no permutation")
    with test("random numbers of an array are those of the integers"):
        values = [0, 1, 12345, 2 ** 63, 2 ** 64 - 1]
        got = [int(x) for x in reference.mix_array(numpy.array(values, dtype=numpy.uint64))]
        check(got == [reference.mix(x) for x in values], got)


def test_start():
    with test("the same seed is the same start"):
        trainer = start("seed_trainer", *SMALL, "--vocab", 97, "--seed", 11)
        twin = os.path.join(run_twin("seed_twin", *SMALL, "--vocab", 97, "--seed", 11, "--steps", 0), "step_00000000")
        left, right = (reference.read_safetensors(os.path.join(run, "model.safetensors")) for run in (trainer, twin))
        check(left.keys() == right.keys(), "other tensors", left.keys() ^ right.keys())
        for name in left.keys() & right.keys():
            check(left[name].shape == right[name].shape, f"{name} is {left[name].shape} and {right[name].shape}")
            error = float((left[name] - right[name]).abs().max())
            check(error <= 1e-8, f"{name} differs by {error:.1e}")  # libm and numpy may round a sine differently
    with test("the trainer starts from the twin's checkpoint, and keeps every bit of it"):
        back = start("seed_back", "--init", twin, "--seq", 16)
        again = reference.read_safetensors(os.path.join(back, "model.safetensors"))
        check(all(torch.equal(again[name], right[name]) for name in right), "a tensor changed")
        data = write_corpus(path("seed_data"))
        run = os.path.join(run_twin("seed_run", "--init", os.path.dirname(twin), "--steps", 0), "step_00000000")
        again = reference.read_safetensors(os.path.join(run, "model.safetensors"))
        check(all(torch.equal(again[name], right[name]) for name in right), "a run has other tensors than its checkpoint")
        file = ["--init", os.path.join(twin, "model.safetensors"), "--steps", 0]
        alone = os.path.join(run_twin("seed_file", *file), "step_00000000", "model.safetensors")
        again = reference.read_safetensors(alone)
        check(all(torch.equal(again[name], right[name]) for name in right), "the file alone has other tensors")
        options = ["--init", twin, "--train", data + "/train_*.bin", "--val", data + "/val_*.bin", "--seq", 16,
                   "--steps", 20, "--warmup", 0, "--lr", 3e-3]
        check_equal(run_trainer("from_twin_c", *options), run_twin("from_twin_torch", *options), 20)


def test_schedules():
    data = write_corpus(path("schedule_data"))
    for schedule, more in (("cosine", []), ("linear", ["--lr-final", 1e-5]),
                           ("constant", ["--clip", 0, "--weight-decay", 0]),
                           ("wsd", ["--lr-final", 0, "--beta1", 0.8, "--beta2", 0.99, "--eps", 1e-6, "--clip", 0.3])):
        with test(f"schedule {schedule} {' '.join(map(str, more))}".rstrip()):
            options = [*SMALL, "--data", data, "--steps", 20, "--warmup", 3, "--lr", 3e-3, "--schedule", schedule,
                       "--eval-every", 0, *more]
            left, right = run_trainer("schedule_c_" + schedule, *options), run_twin("schedule_torch_" + schedule, *options)
            check_equal(left, right, 20)
            for one, other in zip(read_log(left), read_log(right)):
                check(abs(one["lr"] - other["lr"]) <= 1e-8 * max(one["lr"], 1e-9),
                      f"step {one['step']}: lr {one['lr']} and {other['lr']}")


def test_shards():
    with test("unequal shards of all three forms, four epochs"):
        data = write_corpus(path("forms"), sizes=(641, 321, 449))
        tokens = [reference.open_shard(os.path.join(data, f"train_{i}.bin")).astype("<u2") for i in range(3)]
        tokens[1].tofile(os.path.join(data, "train_1.bin"))
        header = numpy.zeros(256, dtype="<i4")
        header[:3] = 20240801, 7, len(tokens[2])
        with open(os.path.join(data, "train_2.bin"), "wb") as file:
            file.write(header.tobytes() + tokens[2].astype("<u4").tobytes())
        options = [*SMALL, "--data", data, "--steps", 100, "--lr", 3e-3, "--warmup", 5, "--eval-every", 50]
        check_equal(run_trainer("forms_c", *options), run_twin("forms_torch", *options), 100)


# --- the runs --------------------------------------------------------------------------------------------------------

def prepare(folder):
    """The corpus that prepare.py makes offline."""
    command = [sys.executable, os.path.join(ROOT, "data", "prepare.py"), "--text", "builtin", "--builtin-bytes", "100000",
               "--out", folder]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    check(done.returncode == 0, done.stdout)
    return folder


def test_hundred_steps():
    data = []
    with test("100 steps of four layers: trainer and PyTorch, from one checkpoint"):
        data.append(prepare(path("builtin")))
        init = start("start", *FOUR_LAYERS, "--data", data[0])
        options = [*FOUR_LAYERS, "--data", data[0], "--init", init, "--steps", 100, "--save-every", 0]
        tiled = run_trainer("tiled", *options, "--attention", "tiled")
        twin = run_twin("torch", *options)
        check_equal(tiled, twin, 100)
        print("  largest differences: " + ", ".join(f"{k} {v:.1e}" for k, v in largest_differences(tiled, twin).items()))
    with test("100 steps of four layers: attention tiled and reference"):
        check_equal(tiled, run_trainer("reference", *options, "--attention", "reference"), 100)
    with test("dev/compare.py finds the same, and --config takes a run's options"):
        again = run_twin("config", "--config", os.path.join(tiled, "config.json"))
        check_equal(tiled, again, 100)
        compare = [sys.executable, os.path.join(ROOT, "dev", "compare.py"), tiled, again, "--max-difference", "1e-4"]
        check(subprocess.run(compare, stdout=subprocess.DEVNULL).returncode == 0, "compare.py fails")
    with test("gradient accumulation: twice batch*seq an update"):
        more = [*FOUR_LAYERS, "--data", data[0], "--init", init, "--steps", 25, "--batch-tokens", 2 * 4 * 64]
        accumulated = run_trainer("accumulated", *more)
        check_equal(accumulated, run_twin("accumulated_torch", *more), 25)
        whole = run_trainer("whole", *more, "--batch", 8)
        check_equal(accumulated, whole, 25)
    with test("another order of the data is not taken for the same run"):
        five = [*options, "--steps", 5, "--warmup", 0]
        first, other = run_trainer("five", *five), run_twin("other", *five, "--seed", 1)
        check(largest_differences(first, other)["loss"] > 10 * BOUND["loss"], "another seed passes the comparison")


def test_paths():
    with test("relative paths are kept in config.json as train_gpt keeps them"):
        write_corpus(path("kept", "x"))
        options = [*SMALL, "--data", "x", "--train", "x/train_?.bin", "--steps", 1, "--warmup", 0, "--eval-every", 0]
        status, _, errors = train(*options, "--device", "cpu", "--out", path("kept_c"), cwd=path("kept"))
        here = os.getcwd()
        os.chdir(path("kept"))
        try:
            run_twin("kept_torch", *options)
        finally:
            os.chdir(here)
        kept = []
        for run in (path("kept_c"), path("kept_torch")):
            with open(os.path.join(run, "config.json")) as file:
                kept.append({key: value for key, value in json.load(file).items() if key in ("data", "train")})
        folder = os.path.realpath(path("kept", "x"))
        wanted = {"data": folder, "train": os.path.join(folder, "train_?.bin")}
        check(kept == [wanted, wanted], kept, errors)


def test_bf16():
    with test("bf16 autocast stays near fp32"):
        data = write_corpus(path("bf16_data"))
        options = [*SMALL, "--data", data, "--steps", 20, "--warmup", 0, "--eval-every", 0]
        difference = largest_differences(run_twin("fp32", *options), run_twin("bf16", *options, "--dtype", "bf16"))["loss"]
        check(0 < difference < 0.05, f"loss differs by {difference:.2e}, expected something below 0.05")


def test_faults():
    """Options and files that are wrong: one sentence and exit status 2."""
    data = write_corpus(path("fault_data"))
    write_shard(path("fault_token.bin"), [1, 2, 3, 200] * 20)
    write_shard(path("fault_count.bin"), [1] * 100, count=99)
    used = run_twin("used", *SMALL, "--data", data, "--steps", 1)
    broken = os.path.join(run_twin("fault_init", *SMALL, "--vocab", 97, "--steps", 0), "step_00000000", "model.safetensors")
    with open(broken, "wb") as file:
        file.write((10 ** 9).to_bytes(8, "little") + b"{}")
    good = [*SMALL, "--train", data + "/train_*.bin", "--vocab", 97, "--eval-every", 0, "--out", path("fault")]
    for options, *words in (
            (["--batch-tokens", 100], "100", "--batch 4 times --seq 16"), (["--lr", -1], "--lr", "-1"),
            (["--schedule", "cosinus"], "--schedule", "cosinus", "wsd"), (["--model", "d0"], "d0", "gpt2-xl"),
            (["--dim", 30, "--heads", 4], "dim 30", "heads 4"), (["--seq", 17, "--context", 16], "--seq 17", "16"),
            (["--warmup", 9, "--steps", 8], "--warmup 9", "--steps 8"), (["--beta2", 1], "--beta2", "below 1"),
            (["--data", data], "--vocab 97", "257"), (["--eval-every", 5], "no validation data"),
            (["--train", "nowhere*"], "no file", "nowhere*"), (["--config", "nowhere"], "nowhere", "No such file"),
            (["--train", path("fault_token.bin")], "fault_token.bin", "token 200 at position 3", "97"),
            (["--train", path("fault_count.bin")], "fault_count.bin", "99", "100"),
            (["--init", broken], "model.safetensors", "1000000000"), (["--init", data], "config.json", "No such file"),
            (["--device", "foo"], "--device", "foo", "cuda:N"), (["--device", "cuda:99"], "cuda:99", "GPUs"),
            (["--resume"], "--resume", "--init"),
            (["--out", used], "already holds a run", used)):
        with test("a fault is one sentence: " + " ".join(map(str, options)).replace(FOLDER.name + "/", "")):
            status, errors = call_twin(*good, *options)
            check(status == 2, "status", status)
            check(all(word in errors for word in words), f"got {errors!r}, expected {words}")
            check(errors.count("\n") == 1, "more than a sentence:", errors)
            check(not os.path.exists(path("fault")), "the folder of the run was made all the same")


def test_options_of_trainer():
    with test("options of the trainer that change nothing here are taken, a kernel's name as well"):
        data = write_corpus(path("foreign_data"))
        plain = [*SMALL, "--data", data, "--steps", 3, "--warmup", 0, "--eval-every", 0]
        expected = read_log(run_twin("foreign_plain", *plain))
        for kernel in ("tiled", "reference", "flash_simt", "auto", "build/attention/online.so"):
            run = run_twin("foreign_" + os.path.basename(kernel), *plain, "--attention", kernel, "--no-graph",
                           "--deterministic", "--stop", 2)
            check([line["loss"] for line in read_log(run)] == [line["loss"] for line in expected], f"{kernel}: other losses")


def test_fixture():
    with test("the fixture of tests/test_gpt.c is what PyTorch computes now"):
        script = os.path.join(HERE, "fixtures", "make_fixtures.py")
        done = subprocess.run([sys.executable, script, "--check"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True)
        check(done.returncode == 0, done.stdout)


test_order()
test_paths()
test_bf16()
test_faults()
test_options_of_trainer()
test_fixture()
if os.path.exists(TRAIN):
    test_start()
    test_schedules()
    test_shards()
    test_hundred_steps()
else:
    with test("the trainer against PyTorch"):
        check(False, f"{TRAIN} is not built: run make")
end()
