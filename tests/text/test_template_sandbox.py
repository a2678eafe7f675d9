import time

import jinja2
import pytest

from headrace.text import template_sandbox
from headrace.text.template_sandbox import TemplateEnvironment, TemplateLimit


def render(source: str, **variables: object) -> str:
    environment = TemplateEnvironment()
    template = environment.from_string(source)
    environment.start_rendering()
    return template.render(variables)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for x in y if x > 1 %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}{% endfor %}", "1/2,2/2"),
        ("{% for x in y %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}", "1"),
        ("{% for x in y %}{% if x == 2 %}{% continue %}{% endif %}{{ x }}{{ loop.nextitem }}{% endfor %}", "123"),
        ("{% set ns = namespace(n=0) %}{% for x in y %}{% set ns.n = ns.n + x %}{% endfor %}{{ ns.n }}", "6"),
        ("a{% generation %}{{ y[0] }}{% endgeneration %}b", "a1b"),
        ("{{ {'k': '<é>'} | tojson }}", '{"k": "<é>"}'),
        ("{{ {'k': 1} | tojson(indent=2) }}", '{\n  "k": 1\n}'),
        ("{{ strftime_now('%%') }}", "%"),
        ("{{ y[::-1] | join('-') }}{{ ', '.join(['a', 'b']) }}", "3-2-1a, b"),
        ("{{ 'a-b'.replace('-', '+') | upper }}{{ 'x' * 3 }}{{ '%02d' % 7 }}{{ '{:>3}'.format(5) }}", "A+Bxxx07  5"),
        ("{% macro m(a, b=2) %}{{ a }}{{ b }}{% endmacro %}{{ m(1) }}{{ undefined }}", "12"),
        ("{% if true %}\n  x\n  {% endif %}\n", "  x\n"),
        ("{% for a in t recursive %}{{ a.n }}{% if a.c %}({{ loop(a.c) }}){% endif %}{% endfor %}", "1(2)"),
        ("{% set x %}a{{ y[0] }}{% endset %}{{ x }}{{ x | length }}", "a12"),
        ("{% macro m(a) %}{{ a }}{% endmacro %}{{ m(10 ** 9) }}{{ none | default(10 ** 6, true) }}", "10000000001000000"),
        ("{{ range(3) | list }}{{ dict(a=1).items() | list }}", "[0, 1, 2][('a', 1)]"),
    ],
)
def test_what_templates_use(source: str, text: str) -> None:
    assert render(source, y=[1, 2, 3], t=[{"n": 1, "c": [{"n": 2}]}]) == text


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{% set ns = namespace(__call__=1) %}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ messages.append(1) }}",
        "{{ 'x'.ljust(9) }}",
        "{{ dict.mro() }}",
    ],
)
def test_python_is_out_of_reach(source: str) -> None:
    with pytest.raises(jinja2.exceptions.SecurityError):
        render(source, messages=[])


@pytest.mark.parametrize("source", ["{{ messages.__init__ }}", "{{ '{0.__class__}'.format(1) }}", "{{ messages['__class__'] }}"])
def test_hidden_attributes_are_undefined(source: str) -> None:
    assert render(source, messages=[]) == ""


DOUBLING = "{% set x = 'aaaaaaaa' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ 'x' * 10**9 }}",
        "{{ 10**9 * [1] }}",
        "{{ 10 ** 10000 }}",
        "{% set ns = namespace(x=10) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
        "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        DOUBLING,
        "{{ ('x' * 100000).replace('x', 'y' * 100000) }}",
        "{{ ('x' * 100000) | replace('x', 'y' * 100000) }}",
        "{{ [['x' * 90000] * 90000] }}",
        "{{ (['x' * 90000] * 90000) | join }}",
        "{{ ('y' * 90000).join(['x'] * 90000) }}",
        "{{ (['x' * 90000] * 90000) | tojson }}",
        "{{ [1, 1] | tojson(indent=100000000) }}",
        "{{ [1] | batch(1000000, 0) | list }}",
        "{{ [1] | slice(1000000) | list }}",
        "{{ 1.5 | round(1000000, 'ceil') }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{w}}'.format(1, w=90000) }}",
        "{{ 'a\n' | indent(100000000) }}",
    ],
)
def test_growth_is_bounded(source: str) -> None:
    start = time.thread_time()
    with pytest.raises(TemplateLimit):
        render(source)
    assert time.thread_time() - start < 2.0


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(100) }}",
        "{% for a in [x, x] recursive %}{{ loop(a) }}{% endfor %}",
    ],
)
def test_time_is_bounded(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_CPU_SECONDS", 0.2)
    deep: list[object] = []
    for _ in range(100):
        deep = [deep, deep]
    start = time.thread_time()
    with pytest.raises(TemplateLimit, match="seconds"):
        render(source, x=deep)
    assert time.thread_time() - start < 2.0


def test_each_rendering_has_its_own_budget() -> None:
    environment = TemplateEnvironment()
    template = environment.from_string("{{ x }}")
    for _ in range(3):
        environment.start_rendering()
        assert len(template.render(x="a" * 40_000_000)) == 40_000_000
