#!/usr/bin/env python3
"""PyTorch's time of a training step: what dev/bench.py puts beside the trainer's on a GPU.

    python3 dev/bench_torch.py --model gpt2 --vocab 50257 --batch 16 --dtype bf16 --mode compiled

The model is that of dev/reference.py, whose options name its shape, in a loop as a PyTorch user would write it for speed:
flash attention (in fp32 the memory-efficient one), bf16 by autocast, fused AdamW, one call that clips the gradients, nothing
read back from the GPU, tokens there beforehand, the vocabulary padded as the trainer pads it. --mode compiled puts model and
loss through torch.compile. fp32 is true fp32. The last line of output is an object: "ms", of each measured step, between
events on the stream; "torch", the version.
"""
import argparse
import contextlib
import json
import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import reference  # noqa: E402

if not reference.MISSING:
    torch, F = reference.torch, reference.F
VOCAB_MULTIPLE = 128  # as layers/gpt.c pads on a GPU


class Loss(reference.Module):
    """A model and its mean loss in one module, so that torch.compile sees both."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens, targets):  # (B, T) each
        return F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())


def make_model(options, device):
    torch.manual_seed(options.seed)
    vocab = -(-options.vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    with torch.device(device) if hasattr(torch.device, "__enter__") else contextlib.nullcontext():
        model = reference.Gpt(options.layers, options.heads, options.dim, options.context, vocab,
                              sdpa=hasattr(F, "scaled_dot_product_attention"))
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.02)
    return model.to(device)


def attention_backend(options, device):
    """Holds scaled_dot_product_attention to one backend on a GPU."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel
    return sdpa_kernel(SDPBackend.FLASH_ATTENTION if options.dtype == "bf16" else SDPBackend.EFFICIENT_ATTENTION)


def run_steps(options, device, compiled, count):
    """Trains `count` steps; returns the milliseconds of each."""
    model = make_model(options, device)
    optimizer, loss_of = reference.make_optimizer(model, options), Loss(model)
    if compiled:
        loss_of = torch.compile(loss_of)
    tokens = torch.randint(options.vocab, (count, options.batch, options.seq + 1), device=device)
    inputs, targets = tokens[:, :, :-1].contiguous(), tokens[:, :, 1:].contiguous()  # (count, B, T)
    parameters = list(model.parameters())

    def step(i):
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=options.dtype == "bf16"):
            loss = loss_of(inputs[i], targets[i])
        loss.backward()
        if options.clip:
            torch.nn.utils.clip_grad_norm_(parameters, options.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    on_gpu = device.type == "cuda"
    marks = []
    for i in range(count + 1):
        marks.append(torch.cuda.Event(enable_timing=True) if on_gpu else 1e3 * time.perf_counter())
        if on_gpu:
            marks[-1].record()
        if i < count:
            step(i)
    if on_gpu:
        torch.cuda.synchronize(device)
    return [a.elapsed_time(b) if on_gpu else b - a for a, b in zip(marks, marks[1:])]


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     epilog="Other options are those of dev/reference.py.", allow_abbrev=False)
    parser.add_argument("--mode", choices=("eager", "compiled"), default="eager")
    parser.add_argument("--warm", type=int, default=10, metavar="N", help="steps before those that are measured")
    parser.add_argument("--steps", type=int, default=30, metavar="N", help="steps that are measured")
    own, others = parser.parse_known_args(arguments)
    try:
        options, given = reference.parse_options(others)
        reference.resolve_options(options, given)
        reference.check_torch(options)
        if own.mode == "compiled" and not hasattr(torch, "compile"):
            raise reference.Fault(f"--mode compiled needs PyTorch 2, this is {torch.__version__}")
    except reference.Fault as fault:
        print(f"bench_torch.py: {fault}", file=sys.stderr)
        return 2
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if options.device == "auto" else options.device)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    with attention_backend(options, device):
        times = run_steps(options, device, own.mode == "compiled", own.warm + own.steps)
    print(json.dumps({"ms": times[own.warm:], "torch": torch.__version__}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
