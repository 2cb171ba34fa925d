"""Updating modules that are imported already.

Some touched modules are often imported before this package: ``torch._inductor.config``, by
``import torch._dynamo`` or by a script that sets options; ``torch._inductor.codecache``, by
``torch._functorch.aot_autograd``, which ``torch.distributed.fsdp`` imports; and
``torch._inductor.fx_passes.post_grad``, by ``torch._inductor.compile_fx``, which torchtitan
imports. Nobody keeps anything of them but references to the module, its functions and its
classes, so these can be updated where they are: functions get new code objects, new definitions
are executed in the module's namespace, new config entries are put into the config module's
registry.

A module is updated in two steps. ``plan_update`` finds out everything that has to change and does
whatever can fail; the returned actions only assign. What can't be done this way is refused.
"""

from __future__ import annotations

import ast
import contextvars
import linecache
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from .errors import HooksError

CONFIG_MODULE = "torch._inductor.config"
LIVE_MODULES = (
    CONFIG_MODULE,
    "torch._inductor.codecache",
    "torch._inductor.fx_passes.post_grad",
)
"""Modules that may be imported before the package; each other touched module must not be."""

Action = Callable[[], None]
_Def = ast.FunctionDef | ast.AsyncFunctionDef


def memory_name(path: str) -> str:
    """The filename of code compiled from a patched source of the module at ``path``.

    No file has it: the disk has the original, and Python up to 3.12 prints an uncaught exception
    with the lines of the file that the code names, if there is one, and asks ``linecache`` only
    otherwise. It lies inside torch's directory, because Dynamo decides by directory what it does
    not trace.
    """
    return f"{path}<patched by torch_ext_bucketing>"


def cache_lines(filename: str, source: bytes) -> None:
    """Make tracebacks and ``inspect`` show ``source`` for code compiled under ``filename``.

    Without a modification time, ``linecache.checkcache`` keeps the entry.
    """
    text = source.decode("utf-8")
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)


def plan_update(module: ModuleType, path: str, before: bytes, after: bytes) -> list[Action]:
    """What turns a live module, made from ``before``, into one made from ``after``.

    Args:
        module: the module, in ``sys.modules``.
        path: its source file.
        before, after: the original and the patched source.

    Raises:
        HooksError: something changed that can't be updated in a live module, named in the
            message; or executing a new top-level statement failed. Nothing is changed then.
    """
    # Functions that keep their code keep the file's name, for the disk has the original.
    filename = memory_name(path)
    actions = _FunctionPlan(module, filename, before, after).plan()
    actions.append(lambda: cache_lines(filename, after))
    if module.__name__ == CONFIG_MODULE:
        actions += _plan_config(module, before, after)
    return actions


def _refusal(module: ModuleType, what: str) -> HooksError:
    return HooksError(
        f"{module.__name__} is imported already and can't be patched where it is: {what}. "
        "Import torch_ext_bucketing before it, or run 'torch-ext-bucketing patch apply'"
    )


# ---------------------------------------------------------------- functions


def _key(node: ast.stmt) -> tuple[str, str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return "definition", node.name
    if isinstance(node, ast.Assign):
        return "assignment", ", ".join(ast.unparse(target) for target in node.targets)
    if isinstance(node, ast.AnnAssign):
        return "assignment", ast.unparse(node.target)
    return "statement", ast.dump(node)


def _keyed(body: list[ast.stmt]) -> dict[tuple[str, str, int], ast.stmt]:
    """Statements by kind, name and occurrence: a property's getter and setter share a name."""
    keyed: dict[tuple[str, str, int], ast.stmt] = {}
    for node in body:
        count = 0
        while (*_key(node), count) in keyed:
            count += 1
        keyed[(*_key(node), count)] = node
    return keyed


def _never_runs(node: ast.stmt) -> bool:
    """Docstrings, and the bodies of ``if TYPE_CHECKING:``."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    if isinstance(node, ast.If) and not node.orelse:
        return ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
    return False


def _code_objects(code: CodeType) -> Iterator[CodeType]:
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield const
            yield from _code_objects(const)


class _FunctionPlan:
    def __init__(self, module: ModuleType, filename: str, before: bytes, after: bytes) -> None:
        self.module = module
        self.filename = filename
        self.before = ast.parse(before)
        self.after = ast.parse(after)
        self.is_config = module.__name__ == CONFIG_MODULE
        self.whole = compile(after, filename, "exec", dont_inherit=True)
        self.codes: dict[str, list[CodeType]] = {}
        for code in _code_objects(self.whole):
            self.codes.setdefault(code.co_qualname, []).append(code)
        self.actions: list[Action] = []

    def refuse(self, what: str) -> HooksError:
        return _refusal(self.module, what)

    def plan(self) -> list[Action]:
        added = self._compare(self.before.body, self.after.body, vars(self.module), "")
        if added:
            self._plan_new_statements(added)
        return self.actions

    def _compare(
        self, before: list[ast.stmt], after: list[ast.stmt], namespace: Any, prefix: str
    ) -> list[ast.stmt]:
        """Plan the changes of a module's or class's body; return its new statements."""
        old, new = _keyed(before), _keyed(after)
        for key, node in old.items():
            # A name that is no longer imported does no harm.
            harmless = _never_runs(node) or isinstance(node, ast.Import | ast.ImportFrom)
            if key not in new and not harmless and not self._in_registry(node):
                raise self.refuse(f"{prefix}{_describe(node)} was removed")
        added = []
        for key, node in new.items():
            was = old.get(key)
            if _never_runs(node) or self._in_registry(node):
                continue
            if was is None:
                added.append(node)
            elif ast.dump(was) == ast.dump(node):
                continue
            elif isinstance(node, _Def) and isinstance(was, _Def):
                if key[2] or (key[0], key[1], 1) in new:
                    raise self.refuse(f"{prefix}{node.name} is defined more than once")
                self._plan_function(was, node, namespace, prefix)
            elif isinstance(node, ast.ClassDef) and isinstance(was, ast.ClassDef):
                self._plan_class(was, node, namespace, prefix)
            else:
                raise self.refuse(f"{prefix}{_describe(node)} changed")
        return added

    def _in_registry(self, node: ast.stmt) -> bool:
        """Config entries and classes of them: compared as values, by ``_plan_config``."""
        return self.is_config and isinstance(node, ast.Assign | ast.AnnAssign | ast.ClassDef)

    def _plan_class(
        self, was: ast.ClassDef, node: ast.ClassDef, namespace: Any, prefix: str
    ) -> None:
        name = f"{prefix}{node.name}"
        heads = [
            [ast.dump(part) for part in (*cls.bases, *cls.keywords, *cls.decorator_list)]
            for cls in (was, node)
        ]
        cls = namespace.get(node.name)
        if heads[0] != heads[1] or not isinstance(cls, type):
            raise self.refuse(f"the head of class {name} changed")
        for method in self._compare(was.body, node.body, vars(cls), f"{name}."):
            if not isinstance(method, _Def) or method.decorator_list or method.name in vars(cls):
                raise self.refuse(f"{name}.{_describe(method)} was added")
            code = self._code(f"{name}.{method.name}")
            if code.co_freevars:
                raise self.refuse(f"{name}.{method.name} was added and uses super() or a closure")
            defaults, kwdefaults = self._defaults(method)
            function = FunctionType(code, vars(self.module), method.name, defaults)
            function.__kwdefaults__ = kwdefaults
            function.__qualname__ = code.co_qualname
            self.actions.append(_setter(cls, method.name, function))

    def _plan_function(self, was: _Def, node: _Def, namespace: Any, prefix: str) -> None:
        name = f"{prefix}{node.name}"
        if [ast.dump(d) for d in was.decorator_list] != [ast.dump(d) for d in node.decorator_list]:
            raise self.refuse(f"the decorators of {name} changed")
        function = _unwrap(namespace.get(node.name), name)
        code = self._code(name)
        if function is None:
            raise self.refuse(f"the function {name} changed, but a decorator hides it")
        if function.__code__.co_freevars != code.co_freevars:
            raise self.refuse(f"the closure of {name} changed")
        # Who else replaced it (another package's patch) would be overridden silently.
        if function.__module__ != self.module.__name__:
            raise self.refuse(f"{name} was replaced by {function.__module__}")
        self.actions.append(_setter(function, "__code__", code))
        if ast.dump(was.args) != ast.dump(node.args):
            defaults, kwdefaults = self._defaults(node)
            self.actions.append(_setter(function, "__defaults__", defaults))
            self.actions.append(_setter(function, "__kwdefaults__", kwdefaults))
        doc = ast.get_docstring(node, clean=False)
        if doc != ast.get_docstring(was, clean=False):
            self.actions.append(_setter(function, "__doc__", doc))

    def _code(self, name: str) -> CodeType:
        codes = self.codes.get(name, [])
        if len(codes) != 1:
            raise self.refuse(f"{name} is defined {len(codes)} times")
        return codes[0]

    def _defaults(self, node: _Def) -> tuple[tuple[Any, ...] | None, dict[str, Any] | None]:
        def value(expression: ast.expr) -> Any:
            try:
                return eval(
                    compile(ast.Expression(expression), self.filename, "eval"), vars(self.module)
                )
            except Exception as error:
                raise self.refuse(f"a default of {node.name} can't be evaluated: {error}") from None

        keywords = {
            arg.arg: value(default)
            for arg, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
            if default is not None
        }
        return tuple(map(value, node.args.defaults)) or None, keywords or None

    def _plan_new_statements(self, added: list[ast.stmt]) -> None:
        allowed = _Def | ast.ClassDef | ast.Import | ast.ImportFrom | ast.Assign | ast.AnnAssign
        taken = vars(self.module)
        for node in added:
            if not isinstance(node, allowed):
                raise self.refuse(f"the statement {ast.unparse(node)[:60]!r} was added")
            if isinstance(node, _Def | ast.ClassDef) and node.name in taken:
                raise self.refuse(f"{node.name} was added, but it is there already")
        # Only what the module's own "from __future__" lines would give, as in the whole.
        flags = self.whole.co_flags & _FUTURE_FLAGS
        code = compile(ast.Module(added, []), self.filename, "exec", flags=flags, dont_inherit=True)
        # New functions see the live module as their globals; their names arrive in one step.
        fresh: dict[str, Any] = {}
        try:
            exec(code, taken, fresh)
        except Exception as error:
            raise self.refuse(f"executing its new definitions failed: {error!r}") from error
        # __annotations__ belongs to the module and is not replaced.
        fresh.pop("__annotations__", None)
        self.actions.append(lambda: taken.update(fresh))


def _future_flags() -> int:
    import __future__

    flags = 0
    for name in __future__.all_feature_names:
        flags |= getattr(__future__, name).compiler_flag
    return flags


_FUTURE_FLAGS = _future_flags()


def _describe(node: ast.stmt) -> str:
    kind, name = _key(node)
    return name if kind != "statement" else f"the statement {ast.unparse(node)[:60]!r}"


def _setter(target: Any, name: str, value: Any) -> Action:
    return lambda: setattr(target, name, value)


def _unwrap(value: Any, qualname: str) -> FunctionType | None:
    """The function that was defined under a name, below what decorators put around it."""
    for _ in range(16):
        if isinstance(value, staticmethod | classmethod):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        elif isinstance(value, FunctionType) and value.__code__.co_qualname == qualname:
            return value
        else:
            value = getattr(value, "__wrapped__", None)
    return None


# ---------------------------------------------------------------- config entries

_STATE_OF_ENTRY = ("user_override", "hide", "_deprecation_warned")


def _scratch_config(module: ModuleType, source: bytes, which: str) -> ModuleType:
    """Execute a config module's source apart from the live one and keep nothing of it.

    The source ends in ``install_config_module(sys.modules[__name__])``, which reads its comments
    through ``inspect.getsource``: for the moment of its execution it needs a name and lines.
    """
    name = f"{module.__name__}__{which}_torch_ext_bucketing"
    filename = f"<{name}>"
    scratch = ModuleType(name)
    scratch.__file__ = filename
    scratch.__package__ = module.__package__
    cache_lines(filename, source)
    sys.modules[name] = scratch
    try:
        exec(compile(source, filename, "exec", dont_inherit=True), vars(scratch))
    except Exception as error:
        raise HooksError(f"the {which} source of {module.__name__} fails: {error!r}") from error
    finally:
        del sys.modules[name]
        linecache.cache.pop(filename, None)
    return scratch


def _definition(entry: Any) -> dict[str, Any]:
    return {key: value for key, value in vars(entry).items() if key not in _STATE_OF_ENTRY}


def _plan_config(module: ModuleType, before: bytes, after: bytes) -> list[Action]:
    """Carry the difference between two sources' registries over to the live registry."""
    old, new = (
        vars(_scratch_config(module, source, which))
        for source, which in ((before, "original"), (after, "patched"))
    )

    def refuse(what: str) -> HooksError:
        return _refusal(module, what)

    for name in ("_implications", "_implication_sources", "_implication_dynamic_sources"):
        if old.get(name) != new.get(name):
            raise refuse(f"its {name} changed")
    live: dict[str, Any] = vars(module)["_config"]
    actions: list[Action] = []
    entries = {}
    for key in new["_config"]:
        if key in old["_config"]:
            entries[key] = live.get(key)
            if entries[key] is None:
                raise refuse(f"its entry {key} is gone")
            was, now = _definition(old["_config"][key]), _definition(new["_config"][key])
            if was != now:
                actions.append(_redefine(entries[key], was, now))
        elif key in live:
            raise refuse(f"it has an entry {key} that its source lacks")
        else:
            _check_namespace(vars(module), key, refuse)
            entries[key] = new["_config"][key]
    for key in old["_config"]:
        if key not in new["_config"]:
            raise refuse(f"its entry {key} was removed")
    # The source's order, because save_config_portable() is pickled into cache keys; then what
    # others added. A new dict, because a thread may be iterating over the present one.
    entries |= {key: entry for key, entry in live.items() if key not in entries}
    ignored = vars(module)["_compile_ignored_keys"] | (
        new["_compile_ignored_keys"] - old["_compile_ignored_keys"]
    )

    def commit() -> None:
        namespace = vars(module)
        namespace["_config"] = entries
        namespace["_compile_ignored_keys"] = ignored
        # The module caches its hash and its dict per context; new variables are empty in each.
        # torch 2.11 has one cached hash and a flag.
        if "_is_dirty" in namespace:
            namespace["_is_dirty"] = True
        for name, value in list(namespace.items()):
            if isinstance(value, contextvars.ContextVar):
                default = contextvars.Context().run(value.get)
                namespace[name] = contextvars.ContextVar(value.name, default=default)

    return [*actions, commit]


def _check_namespace(namespace: Any, key: str, refuse: Callable[[str], HooksError]) -> None:
    for part in key.split(".")[:-1]:
        proxy = namespace.get(part)
        if type(proxy).__name__ != "SubConfigProxy":
            raise refuse(f"the class {part} of its new entry {key} is missing")
        namespace = vars(proxy)


def _redefine(entry: Any, was: dict[str, Any], now: dict[str, Any]) -> Action:
    """Change an entry's default and keep what the user set.

    Reading an entry whose default is a list stores a copy of the list as if the user had set it,
    so a stored list is either such a copy or one that began as one: it gets the same change.
    """

    def commit() -> None:
        for key in now:
            setattr(entry, key, now[key])
        override = entry.user_override
        per_context = isinstance(override, contextvars.ContextVar)  # a plain value in torch 2.11
        stored = override.get() if per_context else override
        old, new = was["default"], now["default"]
        if type(stored) is list and isinstance(old, list) and isinstance(new, list):
            kept = [item for item in stored if item in new or item not in old]
            changed = list(new) if stored == old else kept + [x for x in new if x not in kept + old]
            if per_context:
                override.set(changed)
            else:
                entry.user_override = changed

    return commit
