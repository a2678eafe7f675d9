"""`headrace bench`: measures a server, or a part of one."""

from __future__ import annotations

import argparse
from typing import Any

from headrace.cli.benches import eager_compiled, fragmentation, ladder, load, step

EPILOG = """\
examples:
  headrace bench serve                                         100 requests at once to http://127.0.0.1:8000
  headrace bench serve --request-rate 1,2,4,8 --goodput ttft:500,tpot:50    up to the knee
  headrace bench compare http://a:8000 http://b:8000           two servers in turn, and the ratios
  headrace bench ladder                                        what each measure brings, from a naive server up
  headrace bench step                                          what one step takes, part by part, for a grid of shapes

`headrace bench ACTION --help` explains an action.
"""


def add_parser(verbs: Any) -> None:
    parser: argparse.ArgumentParser = verbs.add_parser(
        "bench", help="measure a server, or a part of one", description="Measures a server from outside, or parts of one inside.", epilog=EPILOG
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    for group in (load, ladder, step, fragmentation, eager_compiled):
        group.add_actions(actions)
