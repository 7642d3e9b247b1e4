"""What the library reads and writes of a tensor.

The library takes addresses of elements that lie one after the other. A tensor that lies otherwise
(strided, channels_last, lazily conjugated or negated) is read from a copy, and written by a copy
when the operation is over. Whatever would make that copy fail is refused here, before anything is
begun.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..coll import Op, Type

TYPES = {
    torch.int8: Type.INT8,
    torch.uint8: Type.UINT8,
    torch.int16: Type.INT16,
    torch.uint16: Type.UINT16,
    torch.int32: Type.INT32,
    torch.uint32: Type.UINT32,
    torch.int64: Type.INT64,
    torch.uint64: Type.UINT64,
    torch.float16: Type.FLOAT16,
    torch.bfloat16: Type.BFLOAT16,
    torch.float32: Type.FLOAT32,
    torch.float64: Type.FLOAT64,
}
_R = dist.ReduceOp.RedOpType
_OPS = {
    _R.SUM: Op.SUM,
    _R.PRODUCT: Op.PROD,
    _R.MAX: Op.MAX,
    _R.MIN: Op.MIN,
    _R.AVG: Op.AVG,
    _R.PREMUL_SUM: Op.SUM,
}
_BIT_OPS = {_R.BAND: Op.BIT_AND, _R.BOR: Op.BIT_OR, _R.BXOR: Op.BIT_XOR}
# Of bool, which is a byte of 0 or 1.
_BOOL_OPS = {_R.SUM: Op.MAX, _R.MAX: Op.MAX, _R.PRODUCT: Op.MIN, _R.MIN: Op.MIN, **_BIT_OPS}

# Where a result is written to, and where it was made.
Copies = Sequence[tuple[torch.Tensor, torch.Tensor]]


def bytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def check_readable(*tensors: torch.Tensor) -> None:
    """Refuses what has no elements in this machine's memory."""
    for tensor in tensors:
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            raise TypeError(
                f"a tensor on {tensor.device}, {tensor.layout}; "
                "'unbroken' takes dense tensors on the CPU"
            )
        if tensor.is_quantized:
            raise TypeError("a quantized tensor; 'unbroken' takes its int_repr()")
        if tensor.numel() == 0:
            continue
        last = tensor.storage_offset() + sum(
            (n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)
        )
        if tensor.untyped_storage().nbytes() < (last + 1) * tensor.element_size():
            raise ValueError(
                f"a tensor of {tensor.numel()} elements whose storage was freed or shrunk: "
                "allocate it first"
            )


def check_writable(*tensors: torch.Tensor) -> None:
    """Refuses also what cannot hold a result."""
    check_readable(*tensors)
    for tensor in tensors:
        # 1: several elements are known to lie at one address.
        if torch._debug_has_internal_overlap(tensor) == 1:
            raise ValueError(
                "a tensor some of whose elements share one address (as expand makes it) cannot "
                "hold a result: give a clone()"
            )


def check_equal(tensors: list, of: torch.Tensor, count: int, what: str) -> None:
    """Refuses a list that has not one tensor of that size and type for each rank."""
    if len(tensors) != count or any(
        t.numel() != of.numel() or t.dtype != of.dtype for t in tensors
    ):
        raise ValueError(f"{what}: {count} tensors of {of.numel()} {of.dtype} are right")


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements, one after the other: the tensor's own memory where they lie so."""
    return _unstrided(tensor.data.resolve_conj().resolve_neg().contiguous())


def _unstrided(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose elements lie one after the other, with strides that say so. Those of
    dimensions of size 1 may be anything, and views of another type refuse that."""
    strides, step = [], 1
    for size in reversed(tensor.shape):
        strides.append(step)
        step *= max(size, 1)
    strides.reverse()
    return tensor if tensor.stride() == tuple(strides) else tensor.as_strided(tensor.shape, strides)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether its elements lie one after the other, as they are."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def writable(tensor: torch.Tensor) -> tuple:
    """Where a result is written, and what is copied then: pairs of a tensor and where from."""
    if is_plain(tensor):
        return _unstrided(tensor.data), []
    into = torch.empty(tensor.shape, dtype=tensor.dtype)
    return into, [(tensor, into)]


def changeable(tensor: torch.Tensor) -> tuple:
    """The same for what is read and written."""
    if is_plain(tensor):
        return _unstrided(tensor.data), []
    flat = readable(tensor)
    return flat, [(tensor, flat)]


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two plain tensors share memory."""
    return a.data_ptr() < b.data_ptr() + bytes_of(b) and b.data_ptr() < a.data_ptr() + bytes_of(a)


def copy_back(copies: Copies) -> None:
    """Writes results to where the program wants them. By `data`: no gradient is recorded, and
    neither leaves nor inference tensors object."""
    for tensor, result in copies:
        tensor.data.copy_(result)


def reduction(tensor: torch.Tensor, op) -> tuple:
    """Type and operator of a reduction, as the library counts them, and what elements are
    multiplied with before it (PREMUL_SUM) or None."""
    kind = op.op if hasattr(op, "op") else op
    if tensor.dtype is torch.bool:
        types, ops = {torch.bool: Type.UINT8}, _BOOL_OPS
    else:
        types, ops = TYPES, _OPS if tensor.dtype.is_floating_point else {**_OPS, **_BIT_OPS}
    if tensor.dtype not in types:
        raise TypeError(
            f"{tensor.dtype} is not reduced by 'unbroken'; these are: "
            f"{', '.join(map(str, TYPES))}, torch.bool"
        )
    if kind not in ops:
        raise ValueError(
            f"{kind} of {tensor.dtype} is not done by 'unbroken'; these are: "
            f"{', '.join(k.name for k in ops)}"
        )
    factor = None
    if kind == _R.PREMUL_SUM:
        if not tensor.dtype.is_floating_point:
            raise ValueError(f"PREMUL_SUM of {tensor.dtype}; it multiplies floating-point numbers")
        factor = op.__getstate__()[1]
    return types[tensor.dtype], ops[kind], factor


def empty_bytes() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)


def flat_of(tensors: list) -> torch.Tensor:
    return torch.cat([readable(t).reshape(-1) for t in tensors])


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return readable(tensor).reshape(-1).view(torch.uint8)
