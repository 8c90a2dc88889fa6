#!/usr/bin/env python3
"""The command line: every bad input gets one sentence that names what was got and what was expected, a non-zero exit status,
and leaves what was there alone. Good input gets what --help promises."""
import glob
import json
import os
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "data"))
from check import check, end, skip, test  # noqa: E402
from prepare import pack_tokenizer  # noqa: E402
from trainer_runs import (ROOT, TINY, TRAIN, build_kernel, checkpoint_bytes, log_values, read_log, train,  # noqa: E402
                          write_corpus, write_shard, write_tokenizer)
from vocabulary import Tokenizer  # noqa: E402

TMP = tempfile.mkdtemp(prefix="flashgpt-cli-")
DATA = write_corpus(os.path.join(TMP, "data"))
SMALL = [*TINY, "--data", DATA, "--steps", "2", "--eval-every", "0", "--print-every", "0"]

# Without a shape, which is the checkpoint's.
FREE = ["--seq", "16", "--batch", "4", "--warmup", "0", "--data", DATA, "--steps", "2", "--eval-every", "0"]


def refused(status, words, *options):
    """The trainer refuses `options` with this status and one sentence that holds all of `words`."""
    got, out, err = train(*options)
    check(got == status, f"status {got}, expected {status}:", out, err)
    lines = err.strip().split("\n")
    check(len(lines) == 1 and lines[0].startswith("train_gpt: "), "expected one sentence on stderr, got:", err)
    for word in words:
        check(str(word) in err, f"'{word}' is missing in:", err)


def bad_options():
    cases = [
        ("an unknown option, with the nearest", 2, ["--bathc", "did you mean --batch?"], ["--bathc", "3"]),
        ("an unknown option far from all", 2, ["--zzzzzzzzzz", "--help"], ["--zzzzzzzzzz"]),
        ("a word that belongs to no option", 2, ["'extra'"], ["extra"]),
        ("a count that is a word", 2, ["--batch", "'abc'", "whole number"], ["--batch", "abc"]),
        ("a count with a tail", 2, ["--batch", "'12x'"], ["--batch", "12x"]),
        ("an empty count", 2, ["--batch", "''"], ["--batch", ""]),
        ("a count of zero where one is least", 2, ["--batch", "got 0", "from 1"], ["--batch", "0"]),
        ("a negative count", 2, ["--steps", "got -1", "from 0"], ["--steps", "-1"]),
        ("a count beyond 64 bits", 2, ["--seed", "99999999999999999999"], ["--seed", "99999999999999999999"]),
        ("a number that is a word", 2, ["--lr", "'fast'"], ["--lr", "fast"]),
        ("a number that is not finite", 2, ["--lr", "'nan'"], ["--lr", "nan"]),
        ("a choice that is none", 2, ["--schedule", "'cos'", "cosine|linear|constant|wsd"], ["--schedule", "cos"]),
        ("a missing value", 2, ["--batch", "needs a value"], ["--batch"]),
        ("a value for a flag", 2, ["--resume", "takes no value"], ["--resume=1"]),
        ("a dim that heads do not divide", 2, ["130", "4", "divisible"], [*SMALL, "--dim", "130", "--heads", "4"]),
        ("a sequence above the context", 2, ["--seq", "64", "32"], [*SMALL, "--seq", "64", "--context", "32"]),
        ("an unknown model", 2, ["--model", "'gpt5'", "gpt2-xl"], [*SMALL, "--model", "gpt5"]),
        ("batch tokens that do not divide", 2, ["--batch-tokens", "100", "64"], [*SMALL, "--batch-tokens", "100"]),
        ("a warmup longer than the run", 2, ["--warmup", "50", "--steps", "2"], [*SMALL, "--warmup", "50"]),
        ("a vocabulary below the tokenizer's", 2, ["--vocab", "50", "257"], [*SMALL, "--vocab", "50"]),
        ("an unknown device", 2, ["--device", "'tpu'", "cuda:N"], [*SMALL, "--device", "tpu"]),
        ("bf16 on the CPU", 2, ["--dtype bf16", "GPU"], [*SMALL, "--device", "cpu", "--dtype", "bf16"]),
        ("an unknown attention kernel", 2, ["'fast'", "tiled"], [*SMALL, "--device", "cpu", "--attention", "fast"]),
        ("an attention file that is not there", 2, ["none.so"], [*SMALL, "--attention", TMP + "/none.so"]),
        ("no data", 2, ["--data", "--train"], [*TINY]),
        ("no validation data", 2, ["validation", "--val", "--eval-every 0"], [*TINY, "--train", DATA + "/train_*.bin"]),
        ("samples without a tokenizer", 2, ["tokenizer.bin"],
         [*TINY, "--train", DATA + "/train_*.bin", "--eval-every", "0", "--sample-every", "1"]),
        ("HellaSwag's turn without its questions", 2, ["--hellaswag-every 5", "--hellaswag FILE"],
         [*SMALL, "--hellaswag-every", "5"]),
        *((f"{option} without samples", 2, [f"{option} has no effect without --sample-every N"], [*SMALL, option, value])
          for option, value in (("--prompt", "a"), ("--sample-tokens", "9"), ("--temperature", "1"), ("--top-k", "5"),
                                ("--top-p", "0.9"))),
        ("resume without a directory", 2, ["--resume", "--out"], [*SMALL, "--resume"]),
        ("resume of a directory that is not there", 2, ["none"], [*SMALL, "--resume", "--out", TMP + "/none"]),
        ("resume and init together", 2, ["--resume", "--init"], [*SMALL, "--resume", "--init", "x", "--out", TMP]),
    ]
    for name, status, words, options in cases:
        with test("refuses " + name):
            refused(status, words, *options)


def bad_data():
    folder = os.path.join(TMP, "bad")
    os.makedirs(folder)

    def shard_case(name, words, write):
        path = os.path.join(folder, "x.bin")
        with test("refuses " + name):
            write(path)
            refused(1, words, *TINY, "--vocab", 97, "--train", path, "--eval-every", 0)

    def raw(data):
        def write(path):
            with open(path, "wb") as file:
                file.write(data)
        return write

    header = struct.pack("<256i", 20240520, 1, 100, *[0] * 253)
    shard_case("an empty shard", ["x.bin", "empty"], raw(b""))
    shard_case("a header cut short", ["x.bin", "1024"], raw(header[:500]))
    shard_case("a shard cut short", ["x.bin", "100"], raw(header + b"\1\0" * 99))
    shard_case("a shard of another version", ["x.bin", "version", "9"],
               raw(struct.pack("<256i", 20240520, 9, 4, *[0] * 253) + b"\1\0" * 4))
    shard_case("a shard too short for a window", ["x.bin", "16"], lambda path: write_shard(path, [1] * 10))
    shard_case("a token beyond the vocabulary", ["x.bin", "29", "97"],
               lambda path: write_shard(path, [1] * 29 + [97] + [1] * 70))
    with test("refuses a glob that matches nothing"):
        refused(1, ["nothing_*.bin"], *TINY, "--train", folder + "/nothing_*.bin", "--eval-every", 0)
    with test("refuses a data directory without shards"):
        refused(1, ["train_*.bin"], *TINY, "--data", folder)
    with test("refuses a directory in place of a shard"):
        refused(1, [folder], *TINY, "--train", folder, "--eval-every", 0)
    with test("refuses a foreign tokenizer"):
        other = write_corpus(os.path.join(TMP, "foreign"))
        raw(b"not a tokenizer")(os.path.join(other, "tokenizer.bin"))
        refused(1, ["tokenizer.bin"], *TINY, "--data", other)
    with test("refuses not enough memory, by how much, and says what would fit"):
        refused(1, ["GiB are free", "too few", "--batch"], *TINY, "--data", DATA, "--seq", 400, "--batch", 16777216)


def bad_out():
    run = os.path.join(TMP, "used")
    with test("refuses a directory that holds a run, and leaves it as it was"):
        status, _, err = train(*SMALL, "--out", run)
        check(status == 0, err)
        before = {name: os.stat(os.path.join(run, name)).st_mtime_ns for name in os.listdir(run) if not name.startswith(".")}
        refused(2, [run, "--resume"], *SMALL, "--out", run)
        after = {name: os.stat(os.path.join(run, name)).st_mtime_ns for name in os.listdir(run) if not name.startswith(".")}
        check(before == after, before, after)
    with test("refuses an --out that is a file"):
        path = os.path.join(TMP, "file")
        open(path, "w").close()
        refused(2, [path], *SMALL, "--out", path)
    with test("refuses an --out that cannot be made"):
        refused(2, ["/proc/none"], *SMALL, "--out", "/proc/none/x")
    with test("resume of a folder that holds no run says what it looked for, and leaves the folder as it was"):
        empty, config = os.path.join(TMP, "holds_none"), os.path.join(TMP, "holds_config")
        os.makedirs(empty)
        os.makedirs(config)
        with open(os.path.join(config, "config.json"), "w") as file:
            json.dump({"model_type": "gpt2", "n_layer": 2}, file)
        for folder, words in ((empty, "looked for a config.json"), (DATA, "looked for a config.json"),
                              (config, "looked in its config.json"), (os.path.join(run, "step_00000002"), "--init")):
            before = sorted(os.listdir(folder))
            for options in ([], SMALL):
                refused(2, ["--resume: --out " + folder, "holds no run", words], "--resume", "--out", folder, *options)
                check(sorted(os.listdir(folder)) == before, before, os.listdir(folder))
        refused(2, ["--resume: --out " + path, "not a directory"], "--resume", "--out", path)
    with test("a run that was killed before it wrote its options starts anew under --resume"):
        open(os.path.join(empty, ".lock"), "w").close()
        status, out, err = train(*SMALL, "--resume", "--out", empty)
        check(status == 0 and os.path.isdir(os.path.join(empty, "step_00000002")), status, out, err)
    with test("a resumed run may not change its shape or its data order"):
        refused(2, ["--dim", "32", "16"], "--out", run, "--resume", "--dim", 32)
        refused(2, ["--seed", "5", "1337"], "--out", run, "--resume", "--seed", 5)
    with test("a resumed run whose config.json lacks an option is refused, but for options of a later version and those given"):
        path = os.path.join(run, "config.json")
        with open(path) as file:
            config = json.load(file)
        for key in config:
            with open(path, "w") as file:
                json.dump({name: value for name, value in config.items() if name != key}, file)
            if key in ("hellaswag", "hellaswag_every", "top_p"):
                status, out, err = train("--out", run, "--resume")
                check(status == 0, key, out, err)
            elif key == "save_every":  # by which a run is told from a model
                refused(2, ["holds no run"], "--out", run, "--resume")
            else:
                refused(2, [f'{path}: got no "{key}", expected all options of the run'], "--out", run, "--resume")
            if key == "seed":
                refused(2, ['got no "seed"'], "--out", run, "--resume", "--seed", config["seed"])
            if key == "lr":
                status, out, err = train("--out", run, "--resume", "--lr", config["lr"])
                check(status == 0, out, err)
        with open(path, "w") as file:
            json.dump(config, file)
    with test("a run that is in use is refused"):
        busy = os.path.join(TMP, "busy")
        process = subprocess.Popen([TRAIN, *SMALL, "--steps", "1000000", "--print-every", "1", "--out", busy],
                                   stdout=subprocess.PIPE, cwd=ROOT, text=True)
        while "step" not in process.stdout.readline():
            pass
        refused(2, [busy, "in use"], "--out", busy, "--resume")
        process.kill()
        process.wait()


def bad_checkpoints():
    run = os.path.join(TMP, "good")
    status, _, err = train(*SMALL, "--out", run)
    good = os.path.join(run, "step_00000002")

    def damaged(name, words, change):
        with test("refuses " + name):
            copy = os.path.join(TMP, "damaged")
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(good, copy)
            change(copy)
            refused(1, words, *FREE, "--init", copy)

    def header(value):
        def change(copy):
            path = os.path.join(copy, "model.safetensors")
            data = open(path, "rb").read()
            open(path, "wb").write(value(data))
        return change

    def config(**values):
        def change(copy):
            path = os.path.join(copy, "config.json")
            content = json.load(open(path))
            content.update(values)
            json.dump(content, open(path, "w"))
        return change

    def with_header(data, text):
        return struct.pack("<Q", len(text)) + text + data[8 + struct.unpack("<Q", data[:8])[0]:]

    with test("the checkpoint to damage is there"):
        check(status == 0 and os.path.isdir(good), err)
    damaged("a checkpoint cut short", ["model.safetensors"], header(lambda data: data[:-100]))
    damaged("a header length beyond the file", ["model.safetensors"],
            header(lambda data: struct.pack("<Q", 2**60) + data[8:]))
    damaged("a header that is no JSON", ["model.safetensors"], header(lambda data: with_header(data, b"{oops}")))
    damaged("a header nested deeply", ["model.safetensors"], header(lambda data: with_header(
        data, b'{"a":' + b"[" * 100000 + b"]" * 100000 + b"}")))
    damaged("overlapping offsets", ["model.safetensors"], header(lambda data: with_header(
        data, b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},'
              b'"b":{"dtype":"F32","shape":[4],"data_offsets":[8,24]}}')))
    damaged("a huge count", ["model.safetensors"], header(lambda data: with_header(
        data, b'{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,16]}}')))
    damaged("an empty model file", ["model.safetensors"], header(lambda data: b""))
    damaged("a config of another model type", ["config.json", "llama"], config(model_type="llama"))
    damaged("a config with another shape than the tensors", ["32"], config(n_embd=32))
    damaged("no config", ["config.json"], lambda copy: os.remove(os.path.join(copy, "config.json")))
    with test("refuses a checkpoint whose shape disagrees with the options"):
        refused(2, ["--layers", "3", "2"], *SMALL, "--init", good, "--layers", 3)
    with test("refuses a checkpoint that is not there"):
        refused(1, ["none"], *SMALL, "--init", TMP + "/none")


def good_use():
    with test("--help lists every option with its default and exits 0"):
        status, out, err = train("--help")
        check(status == 0 and not err, status, err)
        for word in ("--data DIR", "--batch-tokens", "--weight-decay", "[0.1]", "cosine|linear|constant|wsd",
                     "--list-attention"):
            check(word in out, word, "is missing in", out)
    with test("--list-attention prints every kernel and whether it can run"):
        status, out, err = train(*SMALL, "--list-attention", "--device", "cpu")
        check(status == 0 and "tiled" in out and "reference" in out and "ok" in out, out, err)
    with test("--list-attention with --attention NAME prints the same, or says that there is none of that name"):
        check(train(*SMALL, "--list-attention", "--device", "cpu", "--attention", "reference")[1] == out, "another table")
        refused(2, ["unknown attention kernel 'naive'; kernels for cpu: auto, tiled, reference"], *SMALL, "--list-attention",
                "--device", "cpu", "--attention", "naive")
    with test("a kernel for GPUs by name, in a build without CUDA, is told from a name that there is not"):
        declared = []
        for source in glob.glob(os.path.join(ROOT, "attention", "*.cu")):
            with open(source) as file:
                declared += re.findall(r'AttentionKernel attention_(\w+) = \{\s*ATTENTION_ABI,\s*ATTENTION_CUDA,\s*"(\w+)"',
                                       file.read())
        with open(os.path.join(ROOT, "attention", "attention.c")) as file:
            listed = re.findall(r"^    X\((\w+)\)", file.read(), re.M)
        check(sorted(declared) == sorted((name, name) for name in listed) and listed, "attention.c lists", listed,
              "and attention/*.cu have", declared)
        if re.search(r"^\w+ +cuda ", out, re.M):
            skip("this build has CUDA")
        for name in listed:
            for more in ([], ["--list-attention"]):
                refused(2, [f"attention kernel '{name}' is for GPUs, and this was built for the CPU only: build it with "
                            "nvcc (make ARCH=sm_90a), or take one of the kernels for cpu: auto, tiled, reference, or the"],
                        *SMALL, "--device", "cpu", *more, "--attention", name)
    with test("--list-attention with --attention FILE.so lists that too, or says what is wrong with it"):
        kernel = os.path.join(ROOT, os.environ.get("BUILD", "build"), "attention", "naive.so")
        if not os.path.exists(kernel):
            skip(f"{kernel} is not built: make kernels")
        lists = [*SMALL, "--list-attention", "--device", "cpu", "--attention"]
        status, out, err = train(*lists, kernel)
        check(status == 0 and out.startswith("tiled ") and re.search(rf"^naive +cpu +ok .*; from {re.escape(kernel)}$", out,
                                                                     re.M), out, err)
        table = train(*lists[:-1])[1]
        check(out.startswith(table), out, table)
        other = os.path.join(TMP, "refuses.so")
        if not build_kernel(other, 'kernel.refuse = refuse; kernel.name = "picky";'):
            skip("no C compiler that builds a shared object (set CC)")
        status, out, err = train(*lists, other)
        check(status == 0 and re.search(r"^picky +cpu +no .*refuses\.so \(has seen better shapes\)$", out, re.M), out, err)
        for reason, words in ((r"clears\33[2J\nall", r"clears?[2J?all"), ("", "it gives no reason")):
            build_kernel(other, f'kernel.refuse = refuse; kernel.name = "picky"; reason = "{reason}";')
            status, out, err = train(*lists, other)
            check(status == 0 and out.endswith(f"refuses.so ({words})\n"), out, err)
            refused(2, [f"attention kernel 'picky' cannot run here: {words}\n"], *SMALL, "--device", "cpu", "--attention", other)
        bad = os.path.join(TMP, "text.so")
        with open(bad, "w") as file:
            file.write("no object\n")
        for path in (bad, os.path.join(TMP, "none.so")):
            refused(2, ["attention kernel", path], *lists, path)
    with test("what a 0 turns off may have its details all the same"):
        status, out, err = train(*SMALL, "--eval-tokens", 9, "--hellaswag-every", 0, "--save-every", 0, "--sample-every", 0,
                                 "--prompt", "a", "--sample-tokens", 9, "--temperature", 1, "--top-k", 5, "--top-p", 0.9)
        check(status == 0, out, err)
    with test("a resumed run takes from its config.json what an option needs, and says where there is nothing"):
        run = os.path.join(TMP, "sampled")
        status, out, err = train(*SMALL, "--stop", 1, "--sample-every", 2, "--out", run)
        check(status == 0, err)
        refused(2, ["--hellaswag-every 1", "--hellaswag FILE"], "--out", run, "--resume", "--hellaswag-every", 1)
        refused(2, ["--eval-tokens", "without --eval-every N"], "--out", run, "--resume", "--eval-tokens", 9)
        status, out, err = train("--out", run, "--resume", "--prompt", "ab", "--sample-tokens", 5)
        check(status == 0 and "sample at step 2\nab" in out, out, err)
    with test("steps 0 writes the initial checkpoint alone"):
        run = os.path.join(TMP, "zero")
        status, out, err = train(*TINY, "--vocab", 50, "--steps", 0, "--out", run)
        check(status == 0 and os.path.isdir(run + "/step_00000000"), out, err)
    with test("--init takes a run: its newest checkpoint, also where a newer one is damaged"):
        run, new, old = (os.path.join(TMP, name) for name in ("started", "from_run", "from_checkpoint"))
        options = [*SMALL, "--steps", 4, "--save-every", 2, "--eval-every", 0]
        status, out, err = train(*options, "--out", run)
        check(status == 0, err)
        for damage in (False, True):
            if damage:
                os.truncate(run + "/step_00000004/model.safetensors", 50)
            newest = run + f"/step_0000000{2 if damage else 4}"
            for source, target in ((run, new), (newest, old)):
                shutil.rmtree(target, ignore_errors=True)
                status, out, err = train(*options, "--init", source, "--out", target)
                check(status == 0 and newest in out, newest, out, err)
            check(checkpoint_bytes(new + "/step_00000004") == checkpoint_bytes(old + "/step_00000004"), "other weights")
        for command in ([*options], ["generate", "--device", "cpu"], ["evaluate", "--val", DATA + "/val_*.bin"]):
            command[1 if command[0] in ("generate", "evaluate") else 0:0] = ["--init", run]
            status, out, err = train(*command)
            check(status == 0 and "step_00000002 is read: " in err and "step_00000004" in err, command, status, err)
    with test("commands whose answer cannot be written fail; a reader that went away ends them quietly"):
        if not os.path.exists("/dev/full"):
            skip("no /dev/full")
        run = os.path.join(TMP, "from_run")
        with open("/dev/full", "w") as full:  # a run goes on without its terminal, and says so in the end
            done = subprocess.run([TRAIN, *map(str, SMALL), "--out", os.path.join(TMP, "unseen")], cwd=ROOT, stdout=full,
                                  stderr=subprocess.PIPE, text=True)
        check(done.returncode == 1 and done.stderr.startswith("train_gpt: standard output c"), done.returncode, done.stderr)
        check(log_values(os.path.join(TMP, "unseen")), "no losses in the log")
        for command in (["--help"], [*SMALL, "--list-attention"], ["inspect", DATA], ["evaluate", "--init", run, "--val",
                        os.path.join(DATA, "val_*.bin")], ["generate", "--help"]):
            with open("/dev/full", "w") as full:
                done = subprocess.run([TRAIN, *map(str, command)], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
            check(done.returncode == 1 and done.stderr.startswith("train_gpt: standard output c") and
                  done.stderr.count("\n") == 1, command, done.returncode, done.stderr)
            reader, writer = os.pipe()
            os.close(reader)
            done = subprocess.run([TRAIN, *map(str, command)], cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True)
            os.close(writer)
            # A second write may meet the signal's usual end: one is caught, so that a run can save.
            check(done.returncode in (130, -signal.SIGPIPE) and not done.stderr, command, done.returncode, done.stderr)
    with test("a log line holds what is promised, a sample is drawn and logged"):
        run = os.path.join(TMP, "logged")
        status, out, err = train(*TINY, "--data", DATA, "--steps", 4, "--eval-every", 2, "--sample-every", 4,
                                 "--sample-tokens", 20, "--prompt", "ab", "--top-k", 5, "--out", run)
        check(status == 0, err)
        lines = read_log(run)
        steps = [line for line in lines if "loss" in line]
        check([line["step"] for line in steps] == [1, 2, 3, 4], steps)
        for key in ("loss", "lr", "grad_norm", "ms", "tokens_per_second", "mfu"):
            check(key in steps[0], key, steps[0])
        check([line["step"] for line in lines if "val_loss" in line] == [0, 2, 4], lines)
        check([line["sample"][:2] for line in lines if "sample" in line] == ["ab"], lines)
        check("sample at step 4" in out and "validation loss" in out, out)
    with test("the evaluation does not depend on the batch"):
        values = []
        for batch in (1, 3, 8):
            run = os.path.join(TMP, f"eval{batch}")
            status, _, err = train(*TINY, "--data", DATA, "--batch", batch, "--steps", 1, "--lr", 0, "--eval-tokens", 160,
                                   "--out", run)
            check(status == 0, err)
            values.append([line["val_loss"] for line in read_log(run) if "val_loss" in line][0])
        check(max(values) - min(values) < 1e-6, values)
    with test("a learning rate that breaks the model stops the run and names step, tensor and checkpoint"):
        run = os.path.join(TMP, "broken")
        status, out, err = train(*TINY, "--data", DATA, "--steps", 50, "--lr", "1e30", "--clip", 0, "--save-every", 1,
                                 "--schedule", "constant", "--out", run)
        check(status == 1 and "not finite" in err and "step " in err and "last good checkpoint: " + run in err, status, err)
        kept = err.strip().rsplit(" ", 1)[1]
        check(os.path.isdir(kept), kept)
        check(train(*TINY, "--data", DATA, "--steps", 0, "--eval-every", 0, "--init", kept)[0] == 0,
              "the checkpoint it names cannot be read")
    with test("a model that is not finite is not saved, nor called done"):
        run = os.path.join(TMP, "infinite")
        refused(1, ["step 1", "parameter transformer.wte.weight", "last good checkpoint: none"], *TINY, "--data", DATA,
                "--steps", 1, "--lr", "1e10", "--weight-decay", "1e30", "--schedule", "constant", "--eval-every", 0,
                "--out", run)
        check(not [name for name in os.listdir(run) if name.startswith("step_")], os.listdir(run))
    with test("a validation loss that is not finite stops the run and stays out of the log"):
        run = os.path.join(TMP, "novalidation")
        refused(1, ["validation loss is not finite"], *TINY, "--data", DATA, "--steps", 5, "--lr", "1e30", "--eval-every", 1,
                "--save-every", 1, "--out", run)
        check(all(isinstance(line.get("val_loss", 0.0), float) for line in read_log(run)), read_log(run))
        check(not [name for name in os.listdir(run) if name.startswith("step_")], os.listdir(run))
    with test("a NaN of an attention kernel from outside is named, and how to check the kernel"):
        kernel, checks = os.path.join(TMP, "nan.so"), "build/dev/bench_attention --device cpu --shape 4,2,16,8 "
        options = [*TINY, "--data", DATA, "--steps", 3, "--device", "cpu", "--attention", kernel, "--out"]
        cases = [("forward = 0", 1, "step 0: the validation loss is not finite", "output of attention in block 0"),
                 ("forward = 3", 0, "step 2: the loss is not finite", "output of attention in block 1"),
                 ("backward = 2", 0, "step 2: the gradient is not finite", "gradient of transformer.h.1.attn.c_attn.bias")]
        for i, (change, every, what, where) in enumerate(cases):
            if not build_kernel(kernel, f"kernel.forward = forward; kernel.backward = backward; nan_in_{change};"):
                skip("no C compiler that builds a shared object (set CC)")
            run = os.path.join(TMP, f"nan{i}")
            refused(1, [what, f"not finite: {where}; parameters are finite", checks + kernel, "last good checkpoint: none"],
                    *options, run, "--eval-every", every)
            check(not [name for name in os.listdir(run) if name.startswith("step_")], os.listdir(run))
    with test("what an attention kernel from outside says of a fault becomes one line"):
        kernel = os.path.join(TMP, "faulty.so")
        if not build_kernel(kernel, r'kernel.forward = forward; fault = "went\33[2J\nwrong";'):
            skip("no C compiler that builds a shared object (set CC)")
        refused(1, ["attention naive failed: went?[2J?wrong; last"], *SMALL, "--device", "cpu", "--attention", kernel)
    with test("an attention kernel from outside that crashes is named"):
        kernel = os.path.join(TMP, "crash.so")
        if not build_kernel(kernel, "kernel.backward = backward; crash_in_backward = 2;"):
            skip("no C compiler that builds a shared object (set CC)")
        status, _, err = train(*TINY, "--data", DATA, "--steps", 3, "--device", "cpu", "--attention", kernel)
        check(status < 0 and (f"crashed, most likely in the attention kernel {kernel}, which is from outside" in err or
                              "Sanitizer" in err), status, err)
    with test("a prompt that the tokenizer cannot encode is refused before the run starts"):
        odd = write_corpus(os.path.join(TMP, "pairs"))
        with open(os.path.join(odd, "tokenizer.bin"), "wb") as file:
            file.write(struct.pack("<256i", 20240328, 2, 98, 97, *[0] * 252))
            file.write(b"".join(bytes([2]) + b"ab" for _ in range(97)) + b"\x03end")
        run = os.path.join(TMP, "prompted")
        refused(2, ["--prompt", "tokenizer.bin", "lacks the merges"], *TINY, "--data", odd, "--steps", 5, "--sample-every", 1,
                "--prompt", "ab", "--out", run)
        check(not os.path.exists(run), "the run was begun")
    with test("a prompt is encoded with the merges of its tokenizer"):
        # The token "ab" is always followed by z, the tokens a and b by x: a greedy sample tells which the prompt became.
        merged = os.path.join(TMP, "merged")
        os.makedirs(merged)
        table = [bytes([byte]) for byte in range(256)] + [b"ab", b"<|endoftext|>"]
        with open(os.path.join(merged, "tokenizer.bin"), "wb") as file:
            file.write(pack_tokenizer(Tokenizer("merged", table, 257, merges=[(*b"ab", 256)])))
        generator = random.Random(1)
        tokens = [token for _ in range(400) for token in generator.choice(([256, *b"zz"], [*b"abxx"]))]
        for name in ("train_0.bin", "val_0.bin"):
            write_shard(os.path.join(merged, name), tokens)
        run = os.path.join(TMP, "merged_run")
        status, _, err = train(*TINY, "--data", merged, "--steps", 60, "--lr", "1e-2", "--eval-every", 0, "--save-every", 0,
                               "--sample-every", 60, "--sample-tokens", 2, "--prompt", "ab", "--temperature", 0, "--out", run)
        samples = [line["sample"] for line in read_log(run) if "sample" in line] if status == 0 else err
        check(samples == ["abzz"], samples)
    with test("with standard descriptors closed, nothing that is printed lands in the run's files"):
        run = os.path.join(TMP, "closed")
        command = " ".join([TRAIN, *map(str, SMALL), "--save-every 1 --out", run])
        done = subprocess.run(["sh", "-c", f"{command} >&- 2>&- <&-"], cwd=ROOT)
        check(done.returncode == 0 and [line["step"] for line in read_log(run)] == [1, 2], done.returncode)
        check(os.path.getsize(os.path.join(run, ".lock")) == 0, "something was written into .lock")
    with test("a data directory may have any name"):
        odd = os.path.join(TMP, "a[b]*c? \\d")
        shutil.copytree(DATA, odd)
        status, out, err = train(*TINY, "--data", odd, "--steps", 1, "--eval-every", 0)
        check(status == 0, err)
    with test("without --out nothing is written"):
        folder = os.path.join(TMP, "empty")
        os.makedirs(folder)
        done = subprocess.run([TRAIN, *SMALL], cwd=folder, capture_output=True, text=True)
        check(done.returncode == 0 and os.listdir(folder) == [], done.stderr, os.listdir(folder))
    with test("not enough memory under a limit is one sentence, too"):
        limit = 600 << 20
        done = subprocess.run([TRAIN, "--model", "gpt2", "--vocab", "257", "--data", DATA, "--seq", "16"], cwd=ROOT,
                              capture_output=True, text=True,
                              preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
                              env=dict(os.environ, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1"))
        if any(word in done.stderr for word in ("failed to map", "libgomp", "Sanitizer")):
            skip("the libraries themselves do not start under the limit")
        check(done.returncode == 1 and "not enough memory" in done.stderr, done.returncode, done.stderr)


try:
    bad_options()
    bad_data()
    bad_out()
    bad_checkpoints()
    good_use()
finally:
    shutil.rmtree(TMP, ignore_errors=True)
end()
