#!/usr/bin/env python3
"""The attention kernels of attention/ as PyTorch functions: build/libattention.so through ctypes, nothing to compile.

    make libattention
    from torch_attention import attention, attention_packed          # with dev/ on sys.path

    O = attention(Q, K, V)                     # causal; (B, NH, T, HS) tensors, differentiable
    O = attention_packed(qkv, heads)           # qkv (B, T, 3*C) as a GPT's linear layer gives it; O (B, T, C)

Tensors are read where they lie, whatever their strides, as long as the last dimension is contiguous; nothing is copied. Work
goes to the current stream; scratch and what forward keeps for backward come from PyTorch's allocator. `kernel` is a name of
the table, "auto" for the fastest that takes the shape, or the path of a .so (build/attention/*.so). With
torch.use_deterministic_algorithms(True) only deterministic ways are taken; flash_tf32 is taken only where PyTorch's own fp32
products may round their factors to TF32 (torch.backends.cuda.matmul.allow_tf32).

The two functions of a minimal flash attention extension are here too, for (B, NH, T, HS):

    O, L = flash_attention_2_forward(Q, K, V)
    dQ, dK, dV = flash_attention_2_backward(Q, K, V, O, dO, L)       # L: log-sum-exp (B, NH, T)

They keep no state between the calls. Where the kernel keeps more than O and L, backward runs its forward once more.

Environment: LIBATTENTION, the library (default build/libattention.so of this tree).
"""
import ctypes
import operator
import os

import torch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ABI = 2  # ATTENTION_ABI of attention/attention.h, whose structs are mirrored below
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
CPU, CUDA = 0, 1


class Shape(ctypes.Structure):
    """AttentionShape."""
    _fields_ = [("B", ctypes.c_int64), ("T", ctypes.c_int64), ("NH", ctypes.c_int64), ("HS", ctypes.c_int64),
                ("scale", ctypes.c_float), ("dtype", ctypes.c_int), ("deterministic", ctypes.c_int), ("tf32", ctypes.c_int)]


class View(ctypes.Structure):
    """AttentionInput and AttentionOutput, which differ in const only."""
    _fields_ = [("data", ctypes.c_void_p), ("batch_stride", ctypes.c_int64), ("row_stride", ctypes.c_int64),
                ("head_stride", ctypes.c_int64)]


_shape, _pointer = ctypes.POINTER(Shape), ctypes.c_void_p
_Bytes = ctypes.CFUNCTYPE(ctypes.c_size_t, _shape)
_Forward = ctypes.CFUNCTYPE(ctypes.c_char_p, View, _pointer, _pointer, _pointer, View, View, View, _shape, _pointer)
_Backward = ctypes.CFUNCTYPE(ctypes.c_char_p, View, View, View, _pointer, View, View, View, View, View, _pointer, _pointer,
                             _shape, _pointer)


class Kernel(ctypes.Structure):
    """AttentionKernel."""
    _fields_ = [("abi", ctypes.c_int), ("device", ctypes.c_int), ("name", ctypes.c_char_p), ("summary", ctypes.c_char_p),
                ("refuse", ctypes.CFUNCTYPE(ctypes.c_char_p, _shape, ctypes.c_int)), ("saved_bytes", _Bytes),
                ("scratch_bytes", _Bytes), ("forward", _Forward), ("backward", _Backward)]


_library = None


def library():
    """The loaded library; an ImportError says how to build it, or what is wrong with what LIBATTENTION names."""
    global _library
    if _library is None:
        path = os.environ.get("LIBATTENTION", os.path.join(ROOT, "build", "libattention.so"))
        if not os.path.exists(path):
            raise ImportError(f"no {path}: build it with `make libattention`, or name it in LIBATTENTION")
        try:
            loaded = ctypes.CDLL(os.path.abspath(path))  # of a bare name the loader would look elsewhere
        except OSError as fault:
            raise ImportError(f"the attention library cannot be loaded: {fault}") from None
        for symbol in ("attention_table", "attention_choose"):
            if not hasattr(loaded, symbol):
                raise ImportError(f"{path} is not the library that `make libattention` builds: it has no '{symbol}'")
        loaded.attention_table.restype = ctypes.POINTER(ctypes.POINTER(Kernel))
        loaded.attention_table.argtypes = [ctypes.POINTER(ctypes.c_size_t)]
        loaded.attention_choose.restype = ctypes.POINTER(Kernel)
        loaded.attention_choose.argtypes = [ctypes.c_char_p, ctypes.c_int, _shape, ctypes.c_int, ctypes.c_char_p,
                                            ctypes.c_size_t]
        count = ctypes.c_size_t()
        abi = loaded.attention_table(ctypes.byref(count))[0].contents.abi
        if abi != ABI:
            raise ImportError(f"{path} has attention ABI {abi}, dev/torch_attention.py knows {ABI}")
        _library = loaded
    return _library


def kernels(device="cuda"):
    """Names of the kernels built in for "cpu" or "cuda", the fastest first."""
    count = ctypes.c_size_t()
    table = library().attention_table(ctypes.byref(count))
    wanted = CUDA if device == "cuda" else CPU
    return [table[k].contents.name.decode() for k in range(count.value) if table[k].contents.device == wanted]


# --- what a call needs ---------------------------------------------------------------------------------------------------

def _check(Q, K, V):
    """Raises unless these are three (B, NH, T, HS) tensors that a kernel could take."""
    for name, tensor in (("Q", Q), ("K", K), ("V", V)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is {type(tensor).__name__}, expected a tensor")
        if tensor.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected (B, NH, T, HS)")
        if tensor.shape[3] < 1:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected (B, NH, T, HS) with HS of at least 1")
        if tensor.shape != Q.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, Q has {tuple(Q.shape)}: they must be equal")
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{name} is {tensor.dtype}, expected torch.float32 or torch.bfloat16")
        if tensor.dtype != Q.dtype:
            raise TypeError(f"{name} is {tensor.dtype}, Q is {Q.dtype}: they must be equal")
        if tensor.device.type not in ("cpu", "cuda"):
            raise ValueError(f"{name} is on {tensor.device}, expected cpu or cuda")
        if tensor.device != Q.device:
            raise ValueError(f"{name} is on {tensor.device}, Q on {Q.device}: they must be on one device")
        if tensor.shape[3] > 1 and tensor.stride(3) != 1:
            raise ValueError(f"{name} has stride {tensor.stride(3)} in its last dimension, expected 1: call .contiguous()")


def _view(tensor):
    """A (B, NH, T, HS) tensor as a kernel sees it."""
    return View(tensor.data_ptr(), tensor.stride(0), tensor.stride(2), tensor.stride(1))


def _allows_tf32():
    """Whether PyTorch's own products of fp32 factors may round them to TF32."""
    matmul = torch.backends.cuda.matmul
    try:
        return matmul.fp32_precision == "tf32"
    except (AttributeError, AssertionError):  # a PyTorch that knows the older name alone
        return matmul.allow_tf32


class _Call:
    """A kernel chosen for a shape, with what its two functions share."""

    def __init__(self, Q, scale, kernel, tf32=None):
        B, NH, T, HS = Q.shape
        self.device, self.on_gpu = Q.device, Q.device.type == "cuda"
        self.shape = Shape(B, T, NH, HS, HS ** -0.5 if scale is None else scale, DTYPES[Q.dtype],
                           int(torch.are_deterministic_algorithms_enabled()),
                           int(_allows_tf32() if tf32 is None else tf32))
        major, minor = torch.cuda.get_device_capability(Q.device) if self.on_gpu else (0, 0)
        error = ctypes.create_string_buffer(1024)
        chosen = library().attention_choose(os.fspath(kernel).encode(), CUDA if self.on_gpu else CPU,
                                            ctypes.byref(self.shape), 10 * major + minor, error, len(error))
        if not chosen:
            raise ValueError(error.value.decode(errors="replace"))
        self.kernel = chosen.contents

    def buffer(self, count):
        """`count` bytes of the allocator's; they may be none."""
        return torch.empty(count, dtype=torch.uint8, device=self.device)

    def run(self, function, *arguments):
        """Calls one of the kernel's functions on the current stream of the tensors' device."""
        if self.on_gpu:
            with torch.cuda.device(self.device):
                fault = function(*arguments, ctypes.byref(self.shape), torch.cuda.current_stream().cuda_stream)
        else:
            fault = function(*arguments, ctypes.byref(self.shape), None)
        if fault:
            raise RuntimeError(f"{self.kernel.name.decode()}: {fault.decode(errors='replace')}")

    def forward(self, O, Q, K, V):
        """Writes O; returns LSE (B, NH, T) and what backward needs beside it."""
        LSE = torch.empty(Q.shape[:3], dtype=torch.float32, device=self.device)
        saved = self.buffer(self.kernel.saved_bytes(ctypes.byref(self.shape)))
        scratch = self.buffer(self.kernel.scratch_bytes(ctypes.byref(self.shape)))
        self.run(self.kernel.forward, _view(O), LSE.data_ptr(), saved.data_ptr(), scratch.data_ptr(), _view(Q), _view(K),
                 _view(V))
        return LSE, saved

    def backward(self, dQ, dK, dV, dO, Q, K, V, O, LSE, saved):
        """Writes dQ, dK and dV."""
        scratch = self.buffer(self.kernel.scratch_bytes(ctypes.byref(self.shape)))
        self.run(self.kernel.backward, _view(dQ), _view(dK), _view(dV), scratch.data_ptr(), _view(dO), _view(Q), _view(K),
                 _view(V), _view(O), LSE.data_ptr(), saved.data_ptr())


def _rows(Q):
    """An empty tensor shaped as Q with memory (B, T, NH, HS), as the next linear layer wants O."""
    B, NH, T, HS = Q.shape
    return torch.empty((B, T, NH, HS), dtype=Q.dtype, device=Q.device).transpose(1, 2)


def _readable(gradient):
    """The gradient, copied only where its last dimension is not contiguous (as that of a sum, which is expanded)."""
    return gradient if gradient.shape[3] <= 1 or gradient.stride(3) == 1 else gradient.contiguous()


# --- differentiable functions --------------------------------------------------------------------------------------------

class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, Q, K, V, scale, kernel):
        call, O = _Call(Q, scale, kernel), _rows(Q)
        LSE, saved = call.forward(O, Q, K, V)
        ctx.call = call
        ctx.save_for_backward(Q, K, V, O, LSE, saved)
        return O

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dO):
        Q, K, V, O, LSE, saved = ctx.saved_tensors
        dQ, dK, dV = _rows(Q), _rows(Q), _rows(Q)
        ctx.call.backward(dQ, dK, dV, _readable(dO), Q, K, V, O, LSE, saved)
        return dQ, dK, dV, None, None


def _parts(packed, heads):
    """Q, K and V, (B, NH, T, HS) each, of a packed (B, T, 3*C) tensor: views of it."""
    B, T, C3 = packed.shape
    return packed.unflatten(2, (3, heads, C3 // 3 // heads)).permute(2, 0, 3, 1, 4).unbind(0)


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, heads, scale, kernel):
        B, T, C3 = qkv.shape
        Q, K, V = _parts(qkv, heads)
        call, O = _Call(Q, scale, kernel), qkv.new_empty((B, T, C3 // 3))
        LSE, saved = call.forward(O.unflatten(2, (heads, -1)).transpose(1, 2), Q, K, V)
        ctx.call, ctx.heads = call, heads
        ctx.save_for_backward(qkv, O, LSE, saved)
        return O

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dO):
        qkv, O, LSE, saved = ctx.saved_tensors
        dqkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
        if dO.shape[2] > 1 and dO.stride(2) != 1:
            dO = dO.contiguous()
        O, dO = (rows.unflatten(2, (ctx.heads, -1)).transpose(1, 2) for rows in (O, dO))
        ctx.call.backward(*_parts(dqkv, ctx.heads), dO, *_parts(qkv, ctx.heads), O, LSE, saved)
        return dqkv, None, None, None


def attention(Q, K, V, scale=None, kernel="auto"):
    """Causal attention of (B, NH, T, HS) tensors; the result has that shape and memory in the order (B, T, NH, HS).

    scale: factor of Q K^T, 1/sqrt(HS) where None. Gradients flow to Q, K and V, once.
    """
    _check(Q, K, V)
    return _Attention.apply(Q, K, V, scale, kernel)


def attention_packed(qkv, heads, scale=None, kernel="auto"):
    """Causal attention of a packed (B, T, 3*C) tensor: Q, K and V side by side in each row, heads side by side in each.

    Returns (B, T, C). The gradient of qkv is packed as it is.
    """
    if not isinstance(qkv, torch.Tensor) or qkv.dim() != 3:
        raise ValueError(f"qkv is {tuple(qkv.shape) if isinstance(qkv, torch.Tensor) else type(qkv).__name__}, "
                         "expected a (B, T, 3*C) tensor")
    try:
        heads = operator.index(heads)
    except TypeError:
        raise TypeError(f"heads is {type(heads).__name__}, expected an int") from None
    if heads < 1 or qkv.shape[2] % (3 * heads):
        raise ValueError(f"qkv has {qkv.shape[2]} columns, expected a multiple of 3 * {heads} heads")
    if qkv.stride(2) != 1:
        raise ValueError(f"qkv has stride {qkv.stride(2)} in its last dimension, expected 1: call .contiguous()")
    _check(*_parts(qkv, heads))
    return _PackedAttention.apply(qkv, heads, scale, kernel)


# --- the two functions of a minimal extension ----------------------------------------------------------------------------

def flash_attention_2_forward(Q, K, V, scale=None, kernel="auto"):
    """[O, L] of (B, NH, T, HS) tensors: causal attention and its log-sum-exp (B, NH, T), in fp32."""
    _check(Q, K, V)
    O = torch.empty(Q.shape, dtype=Q.dtype, device=Q.device)
    LSE, _ = _Call(Q, scale, kernel).forward(O, Q, K, V)
    return [O, LSE]


def flash_attention_2_backward(Q, K, V, O, dO, L, scale=None, kernel="auto"):
    """[dQ, dK, dV] from what flash_attention_2_forward was given and gave."""
    _check(Q, K, V)
    for name, tensor in (("O", O), ("dO", dO)):
        if tensor.shape != Q.shape or tensor.dtype != Q.dtype or tensor.device != Q.device:
            raise ValueError(f"{name} is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}, Q is {tuple(Q.shape)} "
                             f"{Q.dtype} on {Q.device}: they must be equal")
    if L.shape != Q.shape[:3] or L.dtype != torch.float32 or L.device != Q.device or not L.is_contiguous():
        raise ValueError(f"L is {tuple(L.shape)} {L.dtype} on {L.device}, expected {tuple(Q.shape[:3])} torch.float32 on "
                         f"{Q.device}, contiguous")
    call, O = _Call(Q, scale, kernel), _readable(O)
    saved = call.buffer(0)
    if call.kernel.saved_bytes(ctypes.byref(call.shape)):
        O = torch.empty(Q.shape, dtype=Q.dtype, device=Q.device)
        L, saved = call.forward(O, Q, K, V)
    dQ, dK, dV = (torch.empty(Q.shape, dtype=Q.dtype, device=Q.device) for _ in range(3))
    call.backward(dQ, dK, dV, _readable(dO), Q, K, V, O, L, saved)
    return [dQ, dK, dV]
