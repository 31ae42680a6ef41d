"""Find the call in a running script that is worth profiling, and stop the script there."""

from __future__ import annotations

import ast
import copy
import functools
import importlib
import inspect
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from perfladder.errors import InputError
from perfladder.object_parts import named_modules_of
from perfladder.text import near_names

if TYPE_CHECKING:
    from perfladder.capturing.store import CallContext


class KnownCall(NamedTuple):
    """A method that whole pipelines are called by, with those that override it in subclasses."""

    module: str
    owner: str
    method: str


KNOWN_CALLS = (
    KnownCall("diffusers.pipelines.pipeline_utils", "DiffusionPipeline", "__call__"),
    KnownCall("diffusers.modular_pipelines.modular_pipeline", "ModularPipeline", "__call__"),
    KnownCall("transformers.pipelines.base", "Pipeline", "__call__"),
    KnownCall("transformers.generation.utils", "GenerationMixin", "generate"),
)
WATCH_NAME = "__perfladder_watch__"
_NOT_OUTSIDE = {"staticmethod", "classmethod", "property"}


class Reached(BaseException):
    """Unwinds the script once the call is there; no `except Exception` of its own takes it."""


@dataclass(frozen=True)
class Caught:
    """A call that can be made again.

    Attributes:
        owner: The object that it is made on; None for a function.
        method: The method's name on it; None for a function.
        function: The function itself.
        args: Its arguments.
        kwargs: Its keyword arguments.
        name: What to call it.
        where: File and line that make the call.
        context: Torch's modes and settings at that moment.
        autocast_device: The device type that its autocast is for.
    """

    owner: Any
    method: str | None
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str
    where: str
    context: CallContext
    autocast_device: str

    def __deepcopy__(self, memo: dict[int, Any]) -> Caught:
        """With copies of what a call may change: tensors, generators, caches. The rest, as models, stays the same."""
        args, kwargs = _fresh((self.args, self.kwargs))
        return replace(self, args=args, kwargs=kwargs)

    def again(self, obj: Any) -> Any:
        """Make the call, on the object that stands for its owner now."""
        if self.method is None:
            return self.function(*self.args, **self.kwargs)
        call = obj if self.method == "__call__" else getattr(obj, self.method)
        return call(*self.args, **self.kwargs)


def _fresh(value: Any) -> Any:
    import optree
    import torch

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.detach().clone().requires_grad_(leaf.requires_grad)
        if isinstance(leaf, torch.Generator):
            return leaf.clone_state()
        if type(leaf).__module__.startswith("transformers.cache_utils"):
            return copy.deepcopy(leaf)
        return leaf

    return optree.tree_map(copied, value, none_is_leaf=True)


@dataclass
class _Outermost:
    """What is known of a module that the script calls from outside every other one."""

    caught: Caught
    num_calls: int = 0
    time_s: float = 0.0


@dataclass
class Watch:
    """Catches the n-th call of a function, or of any known pipeline.

    Args:
        function: `name` or `Class.method` in the script, or `module:name`; None for any known pipeline, and the module
            that takes longest where the script calls none.
        nth: Which of its calls, from 1.
    """

    function: str | None = None
    nth: int = 1
    caught: Caught | None = None
    num_calls: int = 0
    outermost: dict[int, _Outermost] = field(default_factory=dict)
    _depth: threading.local = field(default_factory=threading.local)
    _undo: ExitStack = field(default_factory=ExitStack)
    _is_open: bool = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Calls are caught inside the block; after it, what was patched is as before."""
        self._is_open = True
        try:
            with self._undo:
                if self.function is None:
                    self._watch_known()
                elif ":" in self.function:
                    self._watch_named(*self.function.rsplit(":", 1))
                yield
        finally:
            self._is_open = False

    def change(self, tree: ast.Module) -> ast.Module:
        """Mark the function in the script's own syntax tree.

        Raises:
            InputError: The script defines no such function.
        """
        if self.function is None or ":" in self.function:
            return tree
        functions = dict(_functions_in(tree))
        if self.function not in functions:
            raise InputError(
                f"--function {self.function!r}: the script defines no such function. "
                + near_names(self.function, list(functions), "functions")
                + " One of another module is named as module:function."
            )
        node = functions[self.function]
        mark = ast.parse(f"{WATCH_NAME}({self.function!r})", mode="eval").body
        for part in ast.walk(mark):
            ast.copy_location(part, node)
        outer = [n for n, d in enumerate(node.decorator_list) if isinstance(d, ast.Name) and d.id in _NOT_OUTSIDE]
        node.decorator_list.insert(max(outer, default=-1) + 1, mark)
        return tree

    def mark(self, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """The decorator that `change` puts there."""
        method = name.rpartition(".")[2] if "." in name else None
        return lambda function: self._watched(function, name, method=method)

    def _watched(self, function: Callable[..., Any], name: str, *, method: str | None) -> Callable[..., Any]:
        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            depth = getattr(self._depth, "value", 0)
            if not self._is_open or depth or self.caught is not None:
                return function(*args, **kwargs)
            self.num_calls += 1
            if self.num_calls == self.nth:
                # A static method has no object, and one of a class is called on the class.
                has_owner = method is not None and bool(args) and hasattr(args[0], method)
                owner, others = (args[0], args[1:]) if has_owner else (None, args)
                self.caught = _caught(owner, method if has_owner else None, function, others, kwargs, name=name)
                raise Reached
            self._depth.value = depth + 1
            try:
                return function(*args, **kwargs)
            finally:
                self._depth.value = depth

        return watched

    def _watch_known(self) -> None:
        from wrapt import when_imported

        for known in KNOWN_CALLS:
            if known.module in sys.modules:
                self._watch_tree(known, sys.modules[known.module])
            else:
                when_imported(known.module)(functools.partial(self._watch_tree, known))
        self._watch_modules()

    def _watch_tree(self, known: KnownCall, module: Any) -> None:
        """Watch a class's method, and those of its subclasses, also of those to come."""
        root = getattr(module, known.owner, None)
        if root is None or not self._is_open:
            return
        for kind in [root, *_subclasses(root)]:
            self._watch_method(kind, known.method)
        original: Any = vars(root).get("__init_subclass__")

        def init_subclass(cls: type, **kwargs: Any) -> None:
            begin = super(root, cls).__init_subclass__ if original is None else original.__get__(None, cls)  # type: ignore[misc]
            begin(**kwargs)
            self._watch_method(cls, known.method)

        self._set(root, "__init_subclass__", classmethod(init_subclass))

    def _watch_method(self, kind: type, method: str) -> None:
        function = vars(kind).get(method)
        if self._is_open and inspect.isfunction(function):
            self._set(kind, method, self._watched(function, f"{kind.__name__}.{method}", method=method))

    def _watch_named(self, module: str, name: str) -> None:
        """Watch a function of another module, which is imported here.

        Raises:
            InputError: There is no such module or function.
        """
        owner_name, _, last = name.rpartition(".")
        try:
            owner: Any = importlib.import_module(module)
            for part in owner_name.split(".") if owner_name else []:
                owner = getattr(owner, part)
            function = inspect.getattr_static(owner, last)
        except (ImportError, AttributeError) as error:
            raise InputError(f"--function {module}:{name}: {error}.") from error
        if not inspect.isfunction(function):
            raise InputError(f"--function {module}:{name}: a {type(function).__name__}, not a function of Python.")
        self._set(owner, last, self._watched(function, name, method=last if owner_name else None))

    def _set(self, owner: Any, name: str, value: Any) -> None:
        before = vars(owner).get(name)
        if before is None:
            self._undo.callback(delattr, owner, name)
        else:
            self._undo.callback(setattr, owner, name, before)
        setattr(owner, name, value)

    def _watch_modules(self) -> None:
        """Note the modules that the script calls by itself, for where it calls no pipeline."""
        from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

        from perfladder._torch_private import remove_global_forward_hook

        starts = threading.local()

        def begin(module: Any, args: Any) -> None:
            starts.open = [*getattr(starts, "open", []), time.perf_counter()]

        def end(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            *outer, start = starts.open
            starts.open = outer
            if outer:
                return
            name = type(module).__name__
            caught = _caught(module, "__call__", module, args, kwargs, name=f"{name}.__call__")
            known = self.outermost.setdefault(id(module), _Outermost(caught))
            known.caught, known.num_calls = caught, known.num_calls + 1
            known.time_s += time.perf_counter() - start

        self._undo.callback(register_module_forward_pre_hook(begin).remove)
        handle = register_module_forward_hook(end, with_kwargs=True, always_call=True)
        self._undo.callback(remove_global_forward_hook, handle)

    def best(self) -> Caught | None:
        """The call that was caught; or that of the module which took longest, where no pipeline was called."""
        if self.caught is not None:
            return self.caught
        if self.num_calls or not self.outermost:
            return None
        return max(self.outermost.values(), key=lambda known: known.time_s).caught


def _caught(
    owner: Any,
    method: str | None,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    name: str,
) -> Caught:
    import torch

    from perfladder.capturing.context import read_context

    autocast_device = "cuda" if torch.is_autocast_enabled("cuda") else "cpu"
    return Caught(owner, method, function, args, dict(kwargs), name, _where(), read_context(None), autocast_device)


def _where() -> str:
    """The nearest frame outside perfladder and torch."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("perfladder", "torch"):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _functions_in(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Functions by their dotted names, those of classes and in branches too; not those inside functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}{node.name}", node
        else:
            yield from _functions_in(node, f"{prefix}{node.name}." if isinstance(node, ast.ClassDef) else prefix)


def _subclasses(kind: type) -> Iterator[type]:
    inner: type
    for inner in kind.__subclasses__():
        yield inner
        yield from _subclasses(inner)


def modules_used(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """What holds modules and a function reaches by name: its arguments, its closure and its globals."""
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    found: dict[str, Any] = {}
    if code is not None:
        names = _names_in(code)
        found |= {name: value for name, value in function.__globals__.items() if name in names}
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        found |= {name: cell.cell_contents for name, cell in cells if _is_filled(cell)}
    found |= arguments
    return {name: value for name, value in found.items() if _holds_modules(value)}


def _names_in(code: Any) -> set[str]:
    inner: list[Any] = [constant for constant in code.co_consts if inspect.iscode(constant)]
    return set(code.co_names).union(*map(_names_in, inner))


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # an empty cell raises
    except ValueError:
        return False
    return True


def _holds_modules(value: Any) -> bool:
    is_plain = inspect.ismodule(value) or inspect.isclass(value) or inspect.isroutine(value)
    return not is_plain and hasattr(value, "__dict__") and bool(named_modules_of(value))
