#!/usr/bin/env python3
"""dev/torch_attention.py against PyTorch's own autograd in float64: outputs, log-sum-exp and gradients of random dO, on the
CPU and, where PyTorch and the library see one, on a GPU.

Needs PyTorch; where the running Python has none and /usr/bin/python3 does, it goes on with that one.
"""
import importlib.util
import os
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
sys.path[:0] = [HERE, os.path.join(ROOT, "dev")]
from check import check, end, skip, test  # noqa: E402

OTHER = "/usr/bin/python3"
if not importlib.util.find_spec("torch"):
    found = os.path.exists(OTHER) and os.path.realpath(OTHER) != os.path.realpath(sys.executable) and \
        subprocess.run([OTHER, "-c", "import torch"], stderr=subprocess.DEVNULL).returncode == 0
    if found:
        os.execv(OTHER, [OTHER, __file__])
    with test("attention in PyTorch"):
        skip("no Python with PyTorch")
    end()

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("LIBATTENTION", os.path.join(ROOT, os.environ.get("BUILD", "build"), "libattention.so"))

import torch  # noqa: E402
import torch_attention  # noqa: E402
from torch_attention import (attention, attention_packed, flash_attention_2_backward,  # noqa: E402
                             flash_attention_2_forward)

# Largest error relative to the largest element of the tensor, or to 1 where all are smaller. bf16: two roundings of
# 2^-9, and P of the kernel's own.
BOUND = {torch.float32: 5e-6, torch.bfloat16: 2e-2}
SHAPES = [(1, 1, 1, 8), (2, 3, 17, 16), (1, 2, 65, 40), (2, 1, 130, 64), (1, 2, 100, 104), (1, 3, 33, 1)]


def truth(Q, K, V, dO, scale=None):
    """O, LSE, dQ, dK, dV in float64 by PyTorch's autograd, in the order of the formulas."""
    Q, K, V = (x.detach().double().cpu().requires_grad_() for x in (Q, K, V))
    T = Q.shape[2]
    S = (Q.shape[3] ** -0.5 if scale is None else scale) * Q @ K.transpose(2, 3)
    S = S.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -float("inf"))
    O = S.softmax(3) @ V
    O.backward(dO.detach().double().cpu())
    return O.detach(), S.logsumexp(3).detach(), Q.grad, K.grad, V.grad


def random(shape, device, dtype, seed):
    """Bell-shaped numbers off zero mean, as a leaf."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) + 0.25).to(dtype).to(device).requires_grad_()


def compare(names, got, wanted, dtype):
    """Checks tensors against the truth."""
    for name, x, right in zip(names, got, wanted):
        shape = getattr(x, "shape", None)
        if not check(shape == right.shape, f"{name}: shape {shape}, not {right.shape}"):
            continue
        error = (x.detach().double().cpu() - right).abs().max().item() / max(right.abs().max().item(), 1)
        check(error <= BOUND[dtype], f"{name}: relative error {error:.3g}, allowed {BOUND[dtype]:.3g}")


def refusing(function, *tensors, kernel):
    """Calls one of the functions; skips the open test where the kernel refuses the tensors."""
    try:
        return function(*tensors, kernel=kernel)
    except ValueError as error:
        if "cannot run here" not in str(error):
            raise
        return skip(error)


def test_separate(device, dtype, kernel):
    for shape in SHAPES:
        with test(f"{device} {dtype} {kernel}: attention, (B, NH, T, HS) = {shape}"):
            Q, K, V, dO = (random(shape, device, dtype, seed) for seed in range(4))
            O = refusing(attention, Q, K, V, kernel=kernel)
            O.backward(dO.detach())
            right = truth(Q, K, V, dO)
            compare(("O", "dQ", "dK", "dV"), (O, Q.grad, K.grad, V.grad), (right[0], *right[2:]), dtype)


def test_strides(device, dtype):
    B, NH, T, HS = 2, 3, 35, 24
    with test(f"{device} {dtype}: transposed and sliced tensors are read where they lie, any scale"):
        base = random((3, B, T, NH, 2 * HS), device, dtype, 5)
        Q, K, V = (part[..., HS:].transpose(1, 2) for part in base.unbind(0))
        dO = random((B, T, NH, HS), device, dtype, 6).detach().transpose(1, 2)
        O = attention(Q, K, V, scale=0.3)
        O.backward(dO)
        right = truth(Q, K, V, dO, scale=0.3)
        gradients = [part[..., HS:].transpose(1, 2) for part in base.grad.unbind(0)]
        compare(("O", "dQ", "dK", "dV"), (O, *gradients), (right[0], *right[2:]), dtype)
        check(O.transpose(1, 2).is_contiguous(), "O is not laid out as (B, T, NH, HS)")
        check(not base.grad[..., :HS].any(), "the unused halves have a gradient")
    with test(f"{device} {dtype}: the gradient of a sum, which is expanded"):
        Q, K, V = (random((B, NH, T, HS), device, dtype, seed) for seed in range(3))
        attention(Q, K, V).sum().backward()
        right = truth(Q, K, V, torch.ones(B, NH, T, HS))
        check(V.grad is not None and Q.grad is not None, "no gradient")
        compare(("dV",), (V.grad,), (right[4],), dtype)


def test_packed(device, dtype):
    for B, NH, T, HS in SHAPES:
        with test(f"{device} {dtype}: attention_packed, (B, NH, T, HS) = {B, NH, T, HS}"):
            C = NH * HS
            qkv, dO = random((B, T, 3 * C), device, dtype, 7), random((B, T, C), device, dtype, 8).detach()
            O = attention_packed(qkv, NH)
            O.backward(dO)
            heads = [part.unflatten(2, (NH, HS)).transpose(1, 2) for part in qkv.detach().split(C, 2)]
            right = truth(*heads, dO.unflatten(2, (NH, HS)).transpose(1, 2))
            gradients = [part.unflatten(2, (NH, HS)).transpose(1, 2) for part in qkv.grad.split(C, 2)]
            compare(("O", "dQ", "dK", "dV"), (O.unflatten(2, (NH, HS)).transpose(1, 2), *gradients), (right[0], *right[2:]),
                    dtype)
            check(qkv.grad.is_contiguous(), "the gradient is not packed")


def test_pair(device, dtype, kernel):
    for shape in SHAPES:
        with test(f"{device} {dtype} {kernel}: the stateless pair, (B, NH, T, HS) = {shape}"):
            Q, K, V, dO = (random(shape, device, dtype, seed).detach() for seed in range(10, 14))
            O, L = refusing(flash_attention_2_forward, Q, K, V, kernel=kernel)
            gradients = flash_attention_2_backward(Q, K, V, O, dO, L, kernel=kernel)
            right = truth(Q, K, V, dO)
            compare(("O", "dQ", "dK", "dV"), (O, *gradients), (right[0], *right[2:]), dtype)
            check(L.shape == right[1].shape and (L.cpu() - right[1]).abs().max() < 1e-5 * (1 + right[1].abs().max()), "L")


def other_library():
    """The path of a shared library that has nothing to do with attention: one of those that this process has loaded."""
    with open("/proc/self/maps") as maps:
        paths = [line.split()[-1] for line in maps]
    return next((path for path in paths if os.path.basename(path).startswith(("libm.so", "libm-"))), "none")


def test_misuse(device):
    def raises(kind, words, function, *arguments, **named):
        try:
            function(*arguments, **named)
        except kind as error:
            check(words in str(error), f"'{error}' does not say '{words}'")
        else:
            check(False, f"nothing raised, expected {kind.__name__} with '{words}'")

    with test(f"{device}: wrong shapes, types and names are exceptions that say so"):
        Q = torch.zeros(1, 2, 8, 16, device=device)
        raises(ValueError, "expected (B, NH, T, HS)", attention, Q[0], Q, Q)
        raises(ValueError, "they must be equal", attention, Q, Q[:, :, :4], Q)
        raises(TypeError, "torch.float64", attention, Q.double(), Q, Q)
        raises(TypeError, "they must be equal", attention, Q, Q.bfloat16(), Q)
        raises(TypeError, "expected a tensor", attention, Q, Q, None)
        raises(ValueError, "last dimension", attention, Q.transpose(2, 3), Q.transpose(2, 3), Q.transpose(2, 3))
        raises(ValueError, "unknown attention kernel 'nonsense'", attention, Q, Q, Q, kernel="nonsense")
        raises(ValueError, "multiple of 3 * 5", attention_packed, torch.zeros(1, 4, 48, device=device), 5)
        raises(ValueError, "expected a (B, T, 3*C)", attention_packed, Q, 2)
        for none in (Q[..., :0], Q[:0, ..., :0]):
            for function in (attention, flash_attention_2_forward):
                raises(ValueError, "HS of at least 1", function, none, none, none)
            raises(ValueError, "HS of at least 1", flash_attention_2_backward, *[none] * 5, Q[..., 0])
        raises(ValueError, "HS of at least 1", attention_packed, torch.zeros(1, 4, 0, device=device), 2)
        packed = torch.zeros(1, 4, 48, device=device)
        for heads, words in ((2.0, "float"), (None, "NoneType"), ("2", "str"), (torch.ones(2), "Tensor")):
            raises(TypeError, f"heads is {words}, expected an int", attention_packed, packed, heads)
        raises(ValueError, "multiple of 3 * 0", attention_packed, packed, 0)
        check(attention_packed(packed, torch.tensor(2)).shape == (1, 4, 16), "a whole number of another type is not taken")
        raises(ValueError, "L is", flash_attention_2_backward, Q, Q, Q, Q, Q, Q[..., :4, 0])
        raises(ValueError, "dO is", flash_attention_2_backward, Q, Q, Q, Q, Q[:, :1], Q[..., 0])
    with test(f"{device}: an empty batch gives an empty result"):
        check(attention(*[torch.zeros(0, 2, 8, 16, device=device)] * 3).shape == (0, 2, 8, 16), "shape")


def library_fault(path):
    """What is said where LIBATTENTION names `path`; "" where that is taken."""
    right = os.environ["LIBATTENTION"], torch_attention._library
    os.environ["LIBATTENTION"], torch_attention._library = path, None
    try:
        torch_attention.kernels("cpu")
        return ""
    except ImportError as error:
        return str(error)
    finally:
        os.environ["LIBATTENTION"], torch_attention._library = right


def test_library():
    with test("what is no library, or another one, is an ImportError of one sentence"):
        right = os.environ["LIBATTENTION"]
        kernel = os.path.join(os.path.dirname(right), "attention", "naive.so")
        with tempfile.TemporaryDirectory() as folder:
            text = os.path.join(folder, "text.so")
            with open(text, "w") as file:
                file.write("no object\n")
            cases = [(text, "cannot be loaded"), (os.path.join(folder, "none.so"), "make libattention"),
                     *((path, "it has no 'attention_table'") for path in (kernel, other_library()) if os.path.exists(path))]
            for path, words in cases:
                fault = library_fault(path)
                check(path in fault and words in fault and "\n" not in fault, f"{path}: '{fault}' does not say '{words}'")
        check(library_fault(right) == "", "the right one is not taken")


def test_streams():
    with test("cuda: work goes to the current stream"):
        Q = random((4, 8, 1024, 64), "cuda", torch.float32, 21).detach()
        O, side = attention(Q, Q, Q), torch.cuda.Stream()
        for cycles in (10**8, 10**9, 10**10): # longer where the host was too slow for the stream to be asleep still
            torch.cuda.synchronize()
            with torch.cuda.stream(side):
                torch.cuda._sleep(cycles)
                late = Q * 1
                again = attention(late, late, late)
            if not side.query():
                break
        else:
            check(False, "the stream is done too early to tell")
        side.synchronize()
        check(torch.equal(O, again), "the kernel did not wait for its stream")


def test_device(device, dtypes):
    for dtype in dtypes:
        for kernel in ["auto", *torch_attention.kernels(device)]:
            test_separate(device, dtype, kernel)
            test_pair(device, dtype, kernel)
        test_strides(device, dtype)
        test_packed(device, dtype)
    test_misuse(device)


def main():
    if not os.path.exists(os.environ["LIBATTENTION"]):
        with test("attention in PyTorch"):
            skip(f"no {os.environ['LIBATTENTION']}, `make libattention` builds it")
        end()
    test_library()
    test_device("cpu", [torch.float32])
    with test("cpu: bf16 is refused with the reason"):
        Q = torch.zeros(1, 1, 4, 8, dtype=torch.bfloat16)
        try:
            attention(Q, Q, Q)
            check(False, "nothing raised")
        except ValueError as error:
            check("fp32" in str(error), str(error))
    if torch.cuda.is_available() and torch_attention.kernels("cuda"):
        test_device("cuda", [torch.float32, torch.bfloat16])
        test_streams()
    else:
        with test("attention in PyTorch on a GPU"):
            skip("PyTorch sees no GPU" if not torch.cuda.is_available() else "the library was built without CUDA")
    end()


if __name__ == "__main__":
    main()
