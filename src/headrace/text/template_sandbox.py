"""The jinja environment that chat templates run in.

Templates come with models from anywhere, and what they loop over comes from clients. So they are sandboxed, and bounded three ways: CPU time
(looked at in every loop turn and call), characters of text that they join or put out, and numbers that blow text up.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes, sandbox
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

MAX_CPU_SECONDS = 5.0
MAX_WORK = 100_000_000  # characters joined or put out by one rendering
MAX_NUMBER = 100_000  # as an argument of what makes so many items
MAX_BITS = 4096  # of a product or power of whole numbers
_TICKS_PER_CLOCK_READ = 64
_WIDE_FORMAT = re.compile(r"\d{4}|%[^%a-zA-Z]*\*|\{[^{}]*\{[^{}]*\}")  # %5000d, %*d, {:{width}}

_FILTERS = (
    "abs attr batch capitalize count d default dictsort e escape first float format groupby indent int items join last length list lower map "
    "max min reject rejectattr replace reverse round safe select selectattr slice sort string title tojson trim truncate unique upper "
    "urlencode wordcount"
)
_COUNTED_FILTERS = frozenset({"batch", "slice", "round"})
_STRING_METHODS = (
    "capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit isidentifier islower isnumeric isprintable "
    "isspace istitle isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition rsplit rstrip split "
    "splitlines startswith strip swapcase title upper"
)


class TemplateLimit(jinja2.TemplateError):
    """A template asked for more than one rendering may use."""


class _Budget(threading.local):
    """What the rendering in this thread has used so far."""

    ticks = 0
    work = 0
    deadline = float("inf")

    def start(self) -> None:
        self.ticks = self.work = 0
        self.deadline = time.thread_time() + MAX_CPU_SECONDS

    def tick(self) -> None:
        self.ticks += 1
        if self.ticks % _TICKS_PER_CLOCK_READ == 0 and time.thread_time() > self.deadline:
            raise TemplateLimit(f"rendering takes more than {MAX_CPU_SECONDS:g} seconds")

    def charge(self, amount: int) -> None:
        self.work += amount
        if self.work > MAX_WORK:
            raise TemplateLimit(f"rendering makes more than {MAX_WORK} characters of text")


def _size(value: Any) -> int:
    """About how many characters `value` has as text; counts no further than `MAX_WORK`."""
    if isinstance(value, str):
        return len(value)
    size, open_values = 0, [value]
    while open_values and size <= MAX_WORK:
        item = open_values.pop()
        size += len(item) if isinstance(item, str) else 8
        if isinstance(item, dict):
            open_values += item.keys()
            open_values += item.values()
        elif isinstance(item, list | tuple | set):
            open_values += item
    return size


def _growth(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """An upper bound of the characters that an operation which joins text may make; 0 for others."""
    if not args:
        return 0
    subject, rest = args[0], (*args[1:], *kwargs.values())
    match name:
        case "tojson" | "string":
            return _size(subject)
        case "indent":
            widths = [value for value in rest if isinstance(value, int)] + [len(value) for value in rest if isinstance(value, str)]
            return _size(subject) * (1 + max(widths, default=0))
        case "join":
            separator = max((len(value) for value in rest if isinstance(value, str)), default=0)
            return _size(subject) + separator * (len(subject) if hasattr(subject, "__len__") else 0)
        case "replace" if isinstance(subject, str) and len(args) > 2:
            return len(subject) + (subject.count(str(args[1])) + 1) * _size(args[2])
        case "format" if isinstance(subject, str):
            if _WIDE_FORMAT.search(subject):
                raise TemplateLimit("a format asks for a width above 999 or one that is not written in it")
            return len(subject) + (subject.count("%") + subject.count("{")) * (999 + _size(rest))
    return 0


def _check_numbers(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_NUMBER:
            raise TemplateLimit(f"the number {value} is above {MAX_NUMBER}")


class _Namespace(jinja2.utils.Namespace):
    """Without attributes by which Python itself would be steered."""

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _namespace(*args: Any, **kwargs: Any) -> _Namespace:
    for name in dict(*args, **kwargs):
        _check_attribute(name)
    return _Namespace(*args, **kwargs)


def _check_attribute(name: object) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace must not have the attribute {name!r}")


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; here it only groups."""

    tags = {"generation"}  # noqa: RUF012 (jinja's interface)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class TemplateEnvironment(sandbox.ImmutableSandboxedEnvironment):
    """Compiles and bounds templates. Call `start_rendering` in the rendering thread before each one."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        self._budget = _Budget()
        self._string_methods = frozenset(_STRING_METHODS.split())
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters = {name: self._bounded(name, self.filters[name]) for name in _FILTERS.split()}
        self.filters["tojson"] = self._bounded("tojson", self._tojson)
        self.filters["_count"] = self._count
        self.filters["_charge"] = self._charge
        self.globals = {name: self.globals[name] for name in ("dict", "joiner", "cycler")}
        self.globals.update(range=range, namespace=_namespace, raise_exception=_raise_exception, strftime_now=_strftime_now)

    def start_rendering(self) -> None:
        self._budget.start()

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Loops count their turns; whatever is put out or joined by ~ is charged."""
        tree = super()._parse(source, name, filename)
        texts: list[nodes.Output | nodes.Concat] = [*tree.find_all(nodes.Output), *tree.find_all(nodes.Concat)]
        for node in texts:
            node.nodes = [_filtered(child, "_charge") for child in node.nodes]
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = _filtered(loop.iter, "_count")
        tree.set_environment(self)
        return tree

    def call(self, context: jinja2.runtime.Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._budget.tick()
        if function is range:
            _check_numbers(args)
        subject = getattr(function, "__self__", None)
        if isinstance(subject, str):
            name = function.__name__
            # sep.join(parts) has its arguments the other way round.
            self._budget.charge(_growth(name, (*args, subject) if name == "join" else (subject, *args), kwargs))
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_BITS:
                raise TemplateLimit(f"a number has more than {MAX_BITS} bits")
        elif operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(sequence, str | list | tuple) and isinstance(times, int):
                    self._budget.charge(len(sequence) * max(times, 0))
        elif operator == "%" and isinstance(left, str):
            self._budget.charge(_growth("format", (left, right), {}))
        elif operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            self._budget.charge(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format` under the same bounds."""
        function = super().wrap_str_format(value)
        if function is None:
            return None

        def bounded(*args: Any, **kwargs: Any) -> str:
            self._budget.charge(_growth("format", (value.__self__, *args), kwargs))
            return function(*args, **kwargs)

        return bounded

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr not in self._string_methods:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        skip = 1 if hasattr(function, "jinja_pass_arg") else 0  # jinja's own first argument

        @functools.wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            self._budget.tick()
            if name in _COUNTED_FILTERS:
                _check_numbers((*args[skip + 1 :], *kwargs.values()))
            self._budget.charge(_growth(name, args[skip:], kwargs))
            return function(*args, **kwargs)

        return bounded

    def _tojson(self, value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
        """JSON as it is; jinja's own escapes it for HTML."""
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        if indent is None:
            return encoder.encode(value)
        chunks = []
        for chunk in encoder.iterencode(value):  # deep values become long by their indents
            self._budget.charge(len(chunk))
            chunks.append(chunk)
        return "".join(chunks)

    @jinja2.pass_context  # keeps jinja from working it out when the template is compiled
    def _charge(self, _context: jinja2.runtime.Context, value: Any) -> Any:
        self._budget.charge(_size(value))
        return value

    @jinja2.pass_context
    def _count(self, _context: jinja2.runtime.Context, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self._budget.tick()
            yield value


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))
