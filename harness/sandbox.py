"""What judged code may import and touch: a scan of its sources, guarded imports, and an audit of files and programs."""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ast
import builtins
import importlib.machinery
import importlib.util
import os
import shutil
import sys
import sysconfig
import types
from pathlib import Path
from typing import Any, Sequence

ENTRY_MODULE = "solver"
ENTRY_FUNCTION = "paged_gqa_decode"
ALLOWED_PACKAGES = ("torch", "triton", "typing", "math", "__future__")
FORBIDDEN_NAMES = frozenset(
    "__builtins__ __import__ __loader__ __spec__ breakpoint compile delattr eval exec globals open vars".split()
)
ALLOWED_DUNDERS = frozenset(
    "__call__ __doc__ __enter__ __exit__ __getitem__ __init__ __len__ __name__ __version__".split()
)
# Modules that torch happens to expose as attributes, and ways to reach other frames, evaluate text or redefine torch's
# operators.
FORBIDDEN_ATTRIBUTES = frozenset(
    "builtins ctypes f_back f_builtins f_globals f_locals gc gi_frame glob importlib inspect io linecache marshal"
    " multiprocessing os pathlib pickle pkgutil runpy shutil signal site socket subprocess sys sysconfig tb_frame"
    " tempfile threading time traceback _getframe"
    " ForwardRef _eval_type _exec_with_source evaluate_forward_ref get_type_hints"
    " Library TorchDispatchMode TorchFunctionMode _python_dispatch _push_on_torch_dispatch_stack"
    " _push_on_torch_function_stack".split()
)
FORBIDDEN_METHODS = frozenset(("__torch_dispatch__", "__torch_function__"))
_SHARED_LIBRARY = ".so"
_NOT_ALLOWED = ", which is neither allowed nor beside it"


class SubmissionError(Exception):
    """Judged code that is refused before or while it is imported."""


def _is_shared_library(path: Path) -> bool:
    return _SHARED_LIBRARY in path.suffixes


def copy_submission(folder: Path, target: Path) -> None:
    """Copies the Python sources and shared libraries of a submission, and nothing else, into an empty folder."""
    if not (folder / f"{ENTRY_MODULE}.py").is_file():
        raise SubmissionError(f"{folder}: no {ENTRY_MODULE}.py in it")
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        if path.is_dir() or "__pycache__" in relative.parts:
            continue
        if path.suffix == ".py" and folder.resolve() not in path.resolve().parents:
            raise SubmissionError(f"{relative}: a link to a source outside the submission")
        if path.suffix == ".py" or _is_shared_library(path):
            (target / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target / relative)


def sibling_modules(folder: Path) -> frozenset[str]:
    """Top-level names that the submission's own files provide."""
    names = set()
    for path in folder.iterdir():
        if path.suffix == ".py" or any(path.name.endswith(end) for end in importlib.machinery.EXTENSION_SUFFIXES):
            names.add(path.name.split(".")[0])
        elif path.is_dir():
            names.add(path.name)
    return frozenset(names)


class _Scan(ast.NodeVisitor):
    """Collects what one source does that it may not."""

    def __init__(self, file: str, allowed: frozenset[str]) -> None:
        self.file = file
        self.allowed = allowed
        self.faults: list[str] = []

    def _fault(self, node: ast.AST, text: str) -> None:
        self.faults.append(f"{self.file}:{getattr(node, 'lineno', 0)}: {text}")

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.split(".")[0] not in self.allowed:
                self._fault(node, f"imports {alias.name}{_NOT_ALLOWED}")

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        if node.level == 0 and module.split(".")[0] not in self.allowed:
            self._fault(node, f"imports {module}{_NOT_ALLOWED}")
        for alias in node.names:
            self._check_attribute(node, alias.name)

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in FORBIDDEN_NAMES:
            self._fault(node, f"uses {node.id}")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._check_attribute(node, node.attr)
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name in FORBIDDEN_METHODS:
            self._fault(node, f"defines {node.name}")
        self.generic_visit(node)

    def visit_MatchClass(self, node: ast.MatchClass) -> None:
        for name in node.kwd_attrs:
            self._check_attribute(node, name)
        self.generic_visit(node)

    def _check_attribute(self, node: ast.AST, name: str) -> None:
        dunder = name.startswith("__") and name.endswith("__")
        if name in FORBIDDEN_ATTRIBUTES or (dunder and name not in ALLOWED_DUNDERS):
            self._fault(node, f"reaches for {name}")


def scan_sources(folder: Path) -> list[str]:
    """Faults in the submission's sources: forbidden imports, names and attributes; empty when there are none."""
    siblings = sibling_modules(folder)
    faults = []
    for name in sorted(siblings):
        if name in sys.stdlib_module_names or name in (
            "torch",
            "triton",
            "numpy",
            "harness",
            "protocol",
        ):
            faults.append(f"{name}: a sibling module must not take the name of another module")
    allowed = siblings.union(ALLOWED_PACKAGES)
    for path in sorted(folder.rglob("*.py")):
        name = str(path.relative_to(folder))
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"), name)
        except (SyntaxError, ValueError) as error:
            faults.append(f"{name}: not Python: {error}")
            continue
        scan = _Scan(name, allowed)
        scan.visit(tree)
        faults += scan.faults
    return faults


class Guard:
    """Watches judged code at run time; `faults` collects what it tried."""

    def __init__(self, folder: Path, private_folders: Sequence[Path] = ()) -> None:
        self.folder = folder.resolve()
        self.siblings = sibling_modules(folder)
        self.faults: list[str] = []
        self._readable = [str(path) for path in self._readable_folders(private_folders)]
        self._import = builtins.__import__
        self._getattr = builtins.getattr
        self._setattr = builtins.setattr

    def _readable_folders(self, private_folders: Sequence[Path]) -> list[Path]:
        import torch

        # Tracebacks and torch.compile look up the sources of the harness, which hold no case of any spec.
        harness = Path(__file__).resolve().parent
        roots = [
            self.folder,
            *private_folders,
            harness,
            harness.parent / "protocol.py",
            Path(torch.__file__).parents[1],
        ]
        roots += [Path(path) for path in {sys.prefix, sys.base_prefix, *sysconfig.get_paths().values()}]
        roots += [Path(path) for path in "/dev /etc /lib /lib64 /opt /proc /sys /usr".split()]
        return [Path(os.path.realpath(root)) for root in roots if root != Path("/")]

    def fault(self, text: str) -> None:
        if text not in self.faults:
            self.faults.append(text)

    def builtins(self) -> dict[str, Any]:
        """The builtins that judged modules see."""
        table = {name: value for name, value in vars(builtins).items() if name not in FORBIDDEN_NAMES}
        table.update(
            __import__=self._guarded_import,
            getattr=self._guarded_getattr,
            setattr=self._guarded_setattr,
        )
        return table

    def _guarded_import(self, name: str, globals=None, locals=None, fromlist=(), level: int = 0) -> Any:
        if level == 0 and name.split(".")[0] not in self.siblings.union(ALLOWED_PACKAGES):
            self.fault(f"imports {name}{_NOT_ALLOWED}")
            raise ImportError(f"{name}: import not allowed here")
        module = self._import(name, globals, locals, fromlist, level)
        for attribute in fromlist or ():
            if attribute in FORBIDDEN_ATTRIBUTES:
                self.fault(f"imports {attribute} from {name}")
                raise ImportError(f"{name}.{attribute}: import not allowed here")
        return module

    def _guarded_getattr(self, target: Any, name: str, *default: Any) -> Any:
        dunder = name.startswith("__") and name not in ALLOWED_DUNDERS
        if name in FORBIDDEN_ATTRIBUTES or dunder:
            self.fault(f"reaches for {name}")
            raise AttributeError(f"{name}: not allowed here")
        return self._getattr(target, name, *default)

    def _guarded_setattr(self, target: Any, name: str, value: Any) -> None:
        owner = target if isinstance(target, (type, types.ModuleType)) else type(target)
        module = self._getattr(owner, "__module__", None) or self._getattr(owner, "__name__", "")
        if isinstance(target, (type, types.ModuleType)) and module.split(".")[0] not in self.siblings:
            self.fault(f"replaces {name} of {self._getattr(owner, '__name__', owner)}")
            raise AttributeError(f"{name}: may not be replaced")
        self._setattr(target, name, value)

    def audit(self, event: str, arguments: tuple) -> None:
        """Audit hook: refuses files outside the readable folders, and sockets."""
        if event == "open" and isinstance(arguments[0], (str, bytes)):
            path = os.path.realpath(os.fsdecode(arguments[0]))
            if not any(path == root or path.startswith(root + os.sep) for root in self._readable):
                self.fault(f"opens {path}")
                raise PermissionError(f"{path}: outside the submission's folder")
        elif event == "socket.connect":
            self.fault("opens a network connection")
            raise PermissionError("network connections are not allowed")

    def load(self) -> Any:
        """Imports the submission with guarded builtins and returns its entry function."""
        sys.path.insert(0, str(self.folder))
        sys.meta_path.insert(0, _SiblingFinder(self))
        sys.addaudithook(self.audit)
        module = importlib.import_module(ENTRY_MODULE)
        function = getattr(module, ENTRY_FUNCTION, None)
        if not callable(function):
            raise SubmissionError(f"{ENTRY_MODULE}.py: no function {ENTRY_FUNCTION}")
        return function


class _SiblingFinder:
    """Finds the submission's Python modules and runs them with guarded builtins."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        parts = name.split(".")
        if parts[0] not in self._guard.siblings:
            return None
        base = self._guard.folder.joinpath(*parts)
        for file, is_package in ((base.with_suffix(".py"), False), (base / "__init__.py", True)):
            if file.is_file():
                loader = _GuardedLoader(name, str(file), self._guard)
                folders = [str(base)] if is_package else None
                return importlib.util.spec_from_file_location(
                    name, file, loader=loader, submodule_search_locations=folders
                )
        return None


class _GuardedLoader(importlib.machinery.SourceFileLoader):
    """Source loader whose modules see the guard's builtins."""

    def __init__(self, name: str, path: str, guard: Guard) -> None:
        super().__init__(name, path)
        self._guard = guard

    def exec_module(self, module: types.ModuleType) -> None:
        code = self.get_code(module.__name__)
        module.__dict__["__builtins__"] = self._guard.builtins()
        exec(code, module.__dict__)
