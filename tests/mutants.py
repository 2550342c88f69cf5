"""Mutation testing: change a module in many places, one at a time, and list the changes that no test detects.

    python tests/mutants.py src/shortlist/batches/sampler.py tests/batches/test_sampler.py

Each mutant exists in the memory of one process only, which is forked when all tests are collected and then gets the
changed code; no file is changed. It runs the tests that call the changed function, the fastest first, until one fails.
`--only 17` runs one mutant. A change that alters no result needs no test.
"""

from __future__ import annotations

import argparse
import ast
import copy
import inspect
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAIRS = [
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)),
    *((ast.And, ast.Or), (ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.BitAnd, ast.BitOr)),
]
SWAPS = {a: b for pair in PAIRS for a, b in (pair, pair[::-1])} | dict.fromkeys(
    (ast.FloorDiv, ast.Mod, ast.Pow), ast.Mult
)
Change = Callable[[Any], ast.AST]  # changes a node, or gives another one in its place


def changes(node: ast.AST) -> list[Change]:  # noqa: C901 - a table
    match node:
        case ast.Compare():
            return [
                lambda new, at=at: new.ops.__setitem__(at, swapped(new.ops[at])) or new for at in range(len(node.ops))
            ]
        case ast.BinOp(op=op) | ast.BoolOp(op=op) | ast.AugAssign(op=op) if type(op) in SWAPS:
            return [lambda new: setattr(new, "op", swapped(new.op)) or new]
        case ast.UnaryOp():
            return [lambda new: new.operand]
        case ast.Constant(value=bool(value)):
            return [lambda new: ast.Constant(not value)]
        case ast.Constant(value=int(value) | float(value)):
            return [lambda new: ast.Constant(value + 1)]
        case ast.Constant(value=str(value)):
            return [lambda new: ast.Constant("another" + value[:1])]
        case ast.If() | ast.While() | ast.IfExp():
            return [lambda new: setattr(new, "test", ast.UnaryOp(ast.Not(), new.test)) or new]
        case ast.Call():  # there may be no other device
            named = [at for at, keyword in enumerate(node.keywords) if keyword.arg != "device"]
            return [lambda new, at=at: new.keywords.pop(at) and new for at in named]
        case ast.Return(value=ast.AST()):
            return [lambda new: ast.Return(ast.Constant(None))]
        case ast.Expr():
            return [lambda new: ast.Pass()]
        case ast.Break():
            return [lambda new: ast.Continue()]
        case _:
            return []


def swapped(operator: ast.AST) -> ast.AST:
    return SWAPS[type(operator)]()


def places(tree: ast.AST, path: tuple[tuple[str, int | None], ...] = ()) -> Iterator[tuple[Any, ast.AST]]:
    """The nodes that may be changed, with the way to them: no types, decorators, docstrings or messages of errors."""
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns", "decorator_list", "ops", "op", "ctx"):
            continue
        for at, child in enumerate(value) if isinstance(value, list) else ((None, value),):
            if not isinstance(child, ast.AST) or isinstance(child, ast.Raise | ast.Assert | ast.JoinedStr):
                continue
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                continue
            here = (*path, (field, at))
            yield here, child
            yield from places(child, here)


def mutants(tree: ast.Module) -> Iterator[tuple[int, str, ast.Module]]:
    """Line, description and tree of each."""
    for way, node in places(tree):
        for change in changes(node):
            mutant = copy.deepcopy(tree)
            parent: Any = mutant
            for field, at in way[:-1]:
                parent = getattr(parent, field) if at is None else getattr(parent, field)[at]
            field, at = way[-1]
            old = getattr(parent, field) if at is None else getattr(parent, field)[at]
            before = ast.unparse(old)
            new = ast.copy_location(change(old), old)
            if at is None:
                setattr(parent, field, new)
            else:
                getattr(parent, field)[at] = new
            told = f"{before.splitlines()[0][:90]}  ->  {ast.unparse(new).splitlines()[0][:90]}"
            yield getattr(node, "lineno", 0), told, ast.fix_missing_locations(mutant)


def functions(namespace: dict[str, Any], module: str, prefix: str = "") -> dict[str, FunctionType]:
    """The functions and methods that a module defines, by their qualified names."""
    found = {}
    for name, value in namespace.items():
        for each in (value.fget, value.fset) if isinstance(value, property) else (value,):
            each = inspect.unwrap(getattr(each, "__func__", each)) if callable(each) else each
            if isinstance(each, FunctionType) and each.__module__ == module:
                found[prefix + name] = each
        if isinstance(value, type) and value.__module__ == module:
            found |= functions(dict(vars(value)), module, f"{prefix}{name}.")
    return found


def put_in_place(module: ModuleType, tree: ast.Module) -> None:
    """Give a module's functions the code of the tree, and its constants their values, wherever they were imported."""
    fresh = {"__name__": module.__name__, "__file__": module.__file__}
    exec(compile(tree, str(module.__file__), "exec"), fresh)
    old = functions(vars(module), module.__name__)
    for name, new in functions(fresh, module.__name__).items():
        old[name].__code__, old[name].__defaults__ = new.__code__, new.__defaults__
        old[name].__kwdefaults__ = new.__kwdefaults__
    for name, value in fresh.items():
        if isinstance(value, int | float | str | tuple | dict) and not name.startswith("__"):
            for each in [each for key, each in sys.modules.items() if key.startswith("shortlist")]:
                if vars(each).get(name) is vars(module)[name] and each is not module:
                    setattr(each, name, value)
            setattr(module, name, value)


class Runner:
    """A plugin of pytest that runs the collected tests again and again, each time in a process of its own."""

    def __init__(self, module: Path, only: list[int] | None) -> None:
        self.file, self.only, self.failed = module, only, False
        self.counts = {"killed": 0, "timed out": 0, "survived": 0}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed |= report.failed

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        name = ".".join(self.file.relative_to(ROOT / "src").with_suffix("").parts)
        module, tree = sys.modules[name], ast.parse(self.file.read_text(encoding="utf-8"))
        known = self.forked(lambda: self.calls(session.items), 100_000)
        if not isinstance(known, dict):
            sys.exit("The tests fail without any change.")
        for number, (line, told, mutant) in enumerate(mutants(tree)):
            if self.only and number not in self.only:
                continue
            of_all = {code: tests for code, tests in known.items() if code[0] <= line <= code[1]} or known
            chosen = {at: seconds for tests in of_all.values() for at, seconds in tests.items()}
            items = [session.items[at] for at in sorted(chosen, key=lambda at: chosen[at])]

            def check(mutant: ast.Module = mutant, items: list[pytest.Item] = items) -> str:
                put_in_place(module, mutant)
                return "survived" if self.passes(items) else "killed"

            verdict = self.forked(check, 20 + 3 * sum(chosen.values()))
            self.counts[verdict] += 1
            print(f"{verdict:9}  {number:4}  line {line}: {told}  ({len(items)} tests)", flush=True)
        print(f"{self.file.relative_to(ROOT)}: {self.counts}")
        return True

    def passes(self, items: list[pytest.Item]) -> bool:
        self.failed = False
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self.failed:
                return False
        return True

    def calls(self, items: list[pytest.Item]) -> dict[tuple[int, int], dict[int, float]] | None:
        """First and last line of each function of the module that is called -> the tests that do, and their seconds."""
        found: dict[CodeType, dict[int, float]] = {}
        for at, item in enumerate(items):
            called: set[CodeType] = set()
            sys.setprofile(lambda frame, event, _, called=called: called.add(frame.f_code))
            started = time.perf_counter()
            passed = self.passes([item])
            seconds = time.perf_counter() - started
            sys.setprofile(None)
            if not passed:
                return None
            for code in called:
                if code.co_filename == str(self.file) and code.co_name != "<module>":
                    found.setdefault(code, {})[at] = seconds
        return {
            (code.co_firstlineno, max(line or 0 for _, _, line in code.co_lines())): tests
            for code, tests in found.items()
        }

    def forked(self, work: Callable[[], Any], limit: float) -> Any:
        """The result of a function in a process of its own; that it failed or took too long counts as noticed."""
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            nothing = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(nothing, stream)
            try:
                with os.fdopen(writer, "wb") as pipe:
                    pickle.dump(work(), pipe)
            finally:
                os._exit(0)
        os.close(writer)
        signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
        signal.setitimer(signal.ITIMER_REAL, limit)
        with os.fdopen(reader, "rb") as pipe:
            content = pipe.read()
        _, status = os.waitpid(child, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            return "timed out"
        return pickle.loads(content) if content else "killed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("module", type=Path)
    parser.add_argument("tests", nargs="+")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of mutants")
    options = parser.parse_args()
    os.environ |= {"CI": "true", "OMP_NUM_THREADS": "1"}  # CI: hypothesis draws the same examples each time
    sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
    runner = Runner(options.module.resolve(), options.only)
    pytest.main(["-q", "-s", "--tb=no", "--no-summary", "-p", "no:cacheprovider", *options.tests], plugins=[runner])
    sys.exit(runner.counts["survived"] > 0)


if __name__ == "__main__":
    main()
