"""Inductor's generated wrapper, made ready to be gone through without computing.

In: the source of a compiled graph. Out: a `Wrapper` whose `call` is Inductor's own code, statement by statement, in a
namespace where kernels only report that they were called, allocations go through torch's dispatcher (so that fake
tensors take their place) and the GPU is never asked. Python itself then frees what the code frees. Nothing of the
module around `call` runs that could compile, load or launch anything.
"""

from __future__ import annotations

import ast
import importlib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch

from remat.inductor.dry_run.timeline import CannotFollow
from remat.inductor.dry_run.variables import Variables, read_variables

Note = Callable[[str, Sequence[Any], Mapping[str, Any]], None]
"""Told of each kernel call: its name and arguments."""

_NUMBERS = itertools.count()
_STAND_INS = {
    "torch.cuda": "__gpu__",
    "torch.xpu": "__gpu__",
    "torch.Event": "__gpu__.Event",
    "torch.ops.higher_order": "__higher_order__",
    "torch._C._dynamo.guards": "__guards__",
    "torch._C._distributed_c10d": "__distributed__",
}
"""What the code reaches through `torch` that must not be what it is."""
_TO_REWRITE = re.compile(r"torch\.(cuda|xpu|Event|ops\.higher_order|_C)\b|\.copy_\(|\bimport\b|\[[^]]*:")
"""Looking at a line's text first is faster than looking at its syntax."""
_HARNESS = ("get_args", "benchmark_compiled_module")
"""Functions of the text that have nothing to do with the step."""
_SAFE_IMPORTS = ("torch", "math", "cmath", "random", "os", "tempfile", "ctypes")


@dataclass(frozen=True, slots=True)
class Wrapper:
    """One compiled graph; `call_in` binds it to those who watch."""

    file: str
    """Stands as the file name in every frame of the code."""
    variables: Variables
    _lines: Sequence[str]
    _parts: Sequence[tuple[ast.stmt, CodeType]]

    def call_in(self, note: Note, constants: Mapping[str, Any]) -> Callable[[list[Any]], Any]:
        """The wrapper's `call`; it empties the list that it is given, as the compiled code does."""
        names = _namespace(note, self.file)
        for statement, code in self._parts:
            self._execute(statement, code, names)
            _name_kernel(statement, names)
        names.update(constants)
        if not callable(names.get("call")):
            raise CannotFollow("The compiled code has no python function `call`; measure the step instead.")
        return names["call"]

    def line(self, number: int) -> str:
        return self._lines[number - 1].strip() if 0 < number <= len(self._lines) else ""

    def _execute(self, statement: ast.stmt, code: CodeType, names: dict[str, Any]) -> None:
        try:
            exec(code, names)
        except CannotFollow:
            raise
        except Exception as error:
            text = self.line(statement.lineno)[:200]
            raise CannotFollow(
                f"Line {statement.lineno} of the compiled code, `{text}`, cannot be followed: {error!r}."
            ) from error


def read_wrapper(source: str) -> Wrapper:
    file = f"<inductor wrapper {next(_NUMBERS)}>"
    try:
        module = ast.parse(source)
    except SyntaxError as error:
        raise CannotFollow(
            f"The compiled code is not python (line {error.lineno}); measure the step instead."
        ) from error
    lines = source.splitlines()
    kept = [part for part in module.body if not (isinstance(part, ast.If) or getattr(part, "name", "") in _HARNESS)]
    variables = read_variables([part for outer in kept for part in _functions(outer)], lines)
    module.body = kept
    kept = _Rewrite(lines).visit(module).body
    parts = [(part, compile(ast.Module([part], []), file, "exec")) for part in kept]
    return Wrapper(file, variables, lines, parts)


def _functions(part: ast.stmt) -> Iterator[ast.FunctionDef]:
    inside = part.body if isinstance(part, ast.ClassDef) else (part,)
    return (item for item in inside if isinstance(item, ast.FunctionDef))


class Kernel:
    """A kernel of Inductor's, called as `k(...)`, `k.run(..., stream=s)` or `k.k(..., stream)`."""

    def __init__(self, note: Note) -> None:
        self._note = note
        self._name = ""

    def named(self, name: str) -> None:
        self._name = self._name or name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._note(self._name, args, kwargs)
        return Unknown(f"what {self._name} returns")

    def __getattr__(self, attribute: str) -> Any:
        return self.__call__


class Unknown:
    """Something that the code may name but not use."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise CannotFollow(f"The compiled code uses {self._name}, whose memory is not known; measure the step instead.")

    __call__ = __getitem__ = __iter__ = __enter__ = __bool__ = _refuse

    def __getattr__(self, attribute: str) -> Any:
        return Unknown(f"{self._name}.{attribute}")


class _Compiler:
    """Stands for `AsyncCompile`."""

    def __init__(self, note: Note) -> None:
        self._note = note

    def __getattr__(self, kind: str) -> Any:
        return _nothing if kind == "wait" else lambda *_, **__: Kernel(self._note)


class _Gpu:
    """Stands for `torch.cuda`: guards, streams and events that do nothing. Asking for a stream's handle gives 0."""

    def __init__(self, *held: Any) -> None:
        # A TMA descriptor keeps the tensor alive that it was made from.
        self._held = held

    def __call__(self, *args: Any, **_: Any) -> _Gpu:
        return _Gpu(*args)

    def __getattr__(self, attribute: str) -> _Gpu:
        return _Gpu(self._held)

    def __enter__(self) -> _Gpu:
        return self

    def __exit__(self, *_: Any) -> None:
        return None


class _Guards:
    """Stands for Dynamo's C functions, which would not ask the dispatcher."""

    def __getattr__(self, attribute: str) -> Any:
        kind = attribute.removeprefix("_empty_strided_")
        return _allocator(kind) if kind != attribute else _GUARDS.get(attribute, Unknown(attribute))


def _allocator(kind: str) -> Callable[..., Any]:
    device = "cpu" if kind == "cpu_pinned" else kind

    def allocate(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        # A device without a number is that of the graph; a wrapper allocates on no other.
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    return allocate


def _reinterpret(tensor: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


def _check_layout(tensor: torch.Tensor, size: Any, stride: Any, name: str = "") -> None:
    """What the code says a tensor looks like must be what the dry run takes it for; strides may differ by order."""
    found = tensor.untyped_storage().nbytes()
    needed = tensor.element_size() * (tensor.storage_offset() + _span(size, stride))
    if tuple(tensor.shape) != tuple(size) or found < needed:
        raise CannotFollow(
            f"The compiled code expects {tuple(size)} strided {tuple(stride)} {name}, the dry run found "
            f"{tuple(tensor.shape)} strided {tensor.stride()}; measure the step instead."
        )


def _span(size: Any, stride: Any) -> int:
    if 0 in tuple(size):
        return 0
    return 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))


class _Externs:
    """Stands for `extern_kernels`: with `out` nothing is allocated, without it the op runs on fake tensors."""

    def __init__(self, real: Any, note: Note) -> None:
        self._real = real
        self._note = note

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if "out" in kwargs:
                self._note(f"extern_kernels.{name}", args, kwargs)
                return kwargs["out"]
            return getattr(self._real, name)(*args, **kwargs)

        return call


class _HigherOrder:
    """Stands for `torch.ops.higher_order`: random ops whose generator's state is kept or set."""

    def __getattr__(self, name: str) -> Any:
        return _HIGHER_ORDER.get(name, Unknown(f"torch.ops.higher_order.{name}"))


def _cut(tensor: torch.Tensor, start: int | None, end: int | None) -> torch.Tensor:
    return torch.ops.aten.slice.Tensor(tensor, 0, start, end)


def _run_and_save_state(op: Any, *args: Any, **kwargs: Any) -> Any:
    return torch.empty(_STATE_BYTES, dtype=torch.uint8), op(*args, **kwargs)


def _run_with_state(state: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


def _run_graphsafe(op: Any, *args: Any, rng_state: Any = None, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _same(tensor: Any) -> Any:
    return tensor


def _no_stream(*_: Any) -> int:
    return 0


_STATE_BYTES = 5056
"""Of the CPU's generator; a GPU's state is smaller and does not lie on the GPU."""
_HIGHER_ORDER: Mapping[str, Any] = {
    "run_and_save_rng_state": _run_and_save_state,
    "run_with_rng_state": _run_with_state,
    "graphsafe_run_with_rng_state": _run_graphsafe,
}
_GUARDS: Mapping[str, Any] = {
    "assert_size_stride": _check_layout,
    "assert_alignment": _nothing,
    "_reinterpret_tensor": _reinterpret,
    "copy_if_misaligned": _same,
}
_IMPORTED: Mapping[str, Any] = {
    "copy_if_misaligned": _same,
    "run_intermediate_hooks": _nothing,
    "start_graph": _nothing,
    "end_graph": _nothing,
    "check_memory_step": _nothing,
    "track_tensor": _nothing,
    "get_external_object_by_index": _Gpu(),
    "nvtx": _Gpu(),
}
"""By the name under which the code imports it."""


def _namespace(note: Note, file: str) -> dict[str, Any]:
    def bring(module: str, name: str) -> Any:
        return _bring(note, module, name)

    return {
        "__name__": file,
        "__bring__": bring,
        "__copy__": torch.ops.aten.copy_.default,
        "__cut__": _cut,
        "__gpu__": _Gpu(),
        "__guards__": _Guards(),
        "__higher_order__": _HigherOrder(),
        "__distributed__": Unknown("torch.distributed"),
        "print": _nothing,
    }


def _bring(note: Note, module: str, name: str) -> Any:
    """What an import of the code gives."""
    if name == "AsyncCompile":
        return lambda: _Compiler(note)
    if name.endswith("getCurrentRawStream"):
        return _no_stream
    if name in _IMPORTED or module.split(".")[0] == "triton":
        return _IMPORTED.get(name, _Gpu())
    if name == "extern_kernels":
        return _Externs(_imported(module, name), note)
    is_private = module.startswith(("torch._inductor.", "torch._C")) and not name.startswith("_align")
    if module.split(".")[0] not in _SAFE_IMPORTS or is_private:
        return Unknown(f"{module}.{name}")
    return _imported(module, name)


def _imported(module: str, name: str) -> Any:
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


def _name_kernel(statement: ast.stmt, names: Mapping[str, Any]) -> None:
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        target = statement.targets[0].id
        if isinstance(names[target], Kernel):
            names[target].named(target)


class _Rewrite(ast.NodeTransformer):
    """Imports, slices and `copy_` become calls of the dry run's own; what `_STAND_INS` lists becomes its stand-in."""

    def __init__(self, lines: Sequence[str]) -> None:
        self._lines = lines

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.Assign | ast.Expr | ast.Delete | ast.Return):
            text = "\n".join(self._lines[node.lineno - 1 : node.end_lineno])
            return super().visit(node) if _TO_REWRITE.search(text) else node
        return super().visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        stand_in = _STAND_INS.get(ast.unparse(node)) if _starts_with_torch(node) else None
        return self.generic_visit(node) if stand_in is None else _placed(ast.parse(stand_in, mode="eval").body, node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "copy_":
            # The method asks for the tensor's real device, which may not be there.
            op = _placed(ast.Name("__copy__", ast.Load()), node)
            return ast.copy_location(ast.Call(op, [node.func.value, *node.args], node.keywords), node)
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.slice, ast.Slice):
            return node
        # As with `copy_`.
        bounds = [_placed(bound or ast.Constant(None), node) for bound in (node.slice.lower, node.slice.upper)]
        cut = _placed(ast.Name("__cut__", ast.Load()), node)
        return ast.copy_location(ast.Call(cut, [node.value, *bounds], []), node)

    def visit_Import(self, node: ast.Import) -> list[ast.AST]:
        return [
            _bringing(node, alias.asname, alias.name, "") if alias.asname else _bringing(node, head, head, "")
            for alias in node.names
            for head in (alias.name.split(".")[0],)
        ]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> list[ast.AST]:
        return [_bringing(node, alias.asname or alias.name, node.module or "", alias.name) for alias in node.names]


def _starts_with_torch(node: ast.expr) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id == "torch"


def _bringing(node: ast.stmt, target: str, module: str, name: str) -> ast.AST:
    return _placed(ast.parse(f"{target} = __bring__({module!r}, {name!r})").body[0], node)


def _placed(made: Any, node: ast.AST) -> Any:
    """`made` in the place of `node`: a frame's line number must stay that of the source."""
    for inner in ast.walk(made):
        ast.copy_location(inner, node)
    return made
