"""Helpers for tests that run the trainer: small shard sets, runs, their logs."""
import json
import os
import random
import signal
import struct
import subprocess

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TRAIN = os.path.join(ROOT, os.environ.get("TRAIN", "train_gpt"))
TINY = "--layers 2 --heads 2 --dim 16 --seq 16 --batch 4 --warmup 0".split()


def write_shard(path, tokens, count=None):
    """An llm.c shard of uint16 tokens; count overrides what the header says."""
    header = struct.pack("<256i", 20240520, 1, len(tokens) if count is None else count, *[0] * 253)
    with open(path, "wb") as file:
        file.write(header + struct.pack(f"<{len(tokens)}H", *tokens))


def write_tokenizer(path):
    """The tokenizer of bytes: 256 of them and end of text."""
    with open(path, "wb") as file:
        file.write(struct.pack("<256i", 20240328, 2, 257, 256, *[0] * 252))
        for byte in range(256):
            file.write(bytes([1, byte]))
        file.write(b"\x0d<|endoftext|>")


def write_corpus(folder, sizes=(2000,), vocab=97, seed=3):
    """train_N.bin of these sizes, a val_0.bin, tokenizer.bin; tokens follow each other with some regularity."""
    os.makedirs(folder, exist_ok=True)
    generator = random.Random(seed)

    def tokens(count):
        out, state = [], 0
        for _ in range(count):
            state = (state * 5 + generator.choice((1, 2, 7))) % vocab
            out.append(state)
        return out

    for i, size in enumerate(sizes):
        write_shard(os.path.join(folder, f"train_{i}.bin"), tokens(size))
    write_shard(os.path.join(folder, "val_0.bin"), tokens(600))
    write_tokenizer(os.path.join(folder, "tokenizer.bin"))
    return folder


def train(*options, env=None, cwd=ROOT):
    """Runs the trainer; returns (exit status, stdout, stderr)."""
    done = subprocess.run([TRAIN, *map(str, options)], cwd=cwd, capture_output=True, text=True, errors="replace",
                          env=dict(os.environ, **(env or {})))
    return done.returncode, done.stdout, done.stderr


def hear_signals():
    """For preexec_fn: a program that is sent these hears them, also where the tests run under nohup or in the background."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def read_log(run):
    """The lines of a run's log as objects."""
    with open(os.path.join(run, "log.jsonl")) as log:
        return [json.loads(line) for line in log]


def log_values(run):
    """What must be equal bit for bit in two equal runs: (step, key, text of the number) of losses, norms, rates."""
    return [(line["step"], key, repr(line[key])) for line in read_log(run) for key in ("loss", "grad_norm", "lr", "val_loss")
            if key in line]


def checkpoint_bytes(path):
    """Contents of the files of a checkpoint that two equal runs must share."""
    return {name: open(os.path.join(path, name), "rb").read() for name in ("model.safetensors", "optimizer.safetensors")}


def build_kernel(path, change):
    """A shared object of dev/attention/naive.c, changed by a statement in C as it is loaded; False without a compiler."""
    with open(path + ".c", "w") as file:
        file.write(f"""#define attention_kernel naive_kernel
#include "dev/attention/naive.c"
#undef attention_kernel
AttentionKernel attention_kernel;
static const char *reason = "has seen better shapes", *fault;
static const char *refuse(const AttentionShape *shape, int sm) {{ return (void)shape, (void)sm, reason; }}
static int nan_in_forward = -1, nan_in_backward = -1, crash_in_backward = -1; /* number of the call that does so */
static const char *forward(AttentionOutput O, float *L, void *s, void *w, AttentionInput Q, AttentionInput K,
                           AttentionInput V, const AttentionShape *shape, void *stream)
{{
    naive_kernel.forward(O, L, s, w, Q, K, V, shape, stream);
    if (!nan_in_forward--) *(float *)O.data = __builtin_nanf("");
    return fault;
}}
static const char *backward(AttentionOutput dQ, AttentionOutput dK, AttentionOutput dV, void *w, AttentionInput dO,
                            AttentionInput Q, AttentionInput K, AttentionInput V, AttentionInput O, const float *L,
                            const void *s, const AttentionShape *shape, void *stream)
{{
    naive_kernel.backward(dQ, dK, dV, w, dO, Q, K, V, O, L, s, shape, stream);
    if (!nan_in_backward--) *(float *)dV.data = __builtin_nanf("");
    if (!crash_in_backward--) *(volatile int *)0 = 1;
    return 0;
}}
__attribute__((constructor)) static void prepare(void)
{{
    AttentionKernel kernel = naive_kernel;
    (void)refuse, (void)forward, (void)backward;
    {change}
    attention_kernel = kernel;
}}
""")
    compiler = os.environ.get("CC", "cc").split() or ["cc"]
    try:
        done = subprocess.run([*compiler, "-I.", "-O1", "-fPIC", "-shared", path + ".c", "-o", path, "-lm"], cwd=ROOT)
    except OSError:
        return False
    return done.returncode == 0
