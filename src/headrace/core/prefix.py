"""Identity of a full block: its tokens, all tokens before it, and the salt of its request.

A digest finds candidates; equality is then decided on the tokens themselves, so a colliding hash function costs time and never gives a
request another prompt's keys and values. Nodes are shared: a request that matches a cached block adopts the block's node, so the walk to
the root that proves equality almost always ends at the first step.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass

HashFunction = Callable[[bytes], bytes]


def blake2b_digest(data: bytes) -> bytes:
    """The default hash: 128 bits, the same in every process whatever PYTHONHASHSEED."""
    return hashlib.blake2b(data, digest_size=16).digest()


@dataclass(slots=True, kw_only=True, eq=False)
class PrefixNode:
    """One full block in the tree of all prefixes. Never changed once made."""

    parent: PrefixNode | None  # the block before it; None at the start of the prompt
    salt: str | None  # of the request; the same in the whole chain
    token_ids: tuple[int, ...]  # block_size of them
    digest: bytes  # over the parent's digest, the salt and the tokens


def make_node(parent: PrefixNode | None, salt: str | None, token_ids: tuple[int, ...], hash_function: HashFunction) -> PrefixNode:
    if parent is not None:
        head = parent.digest
    else:
        head = b"\x00" if salt is None else b"\x01" + salt.encode("utf-8", "surrogatepass") + b"\x00"
    return PrefixNode(parent=parent, salt=salt, token_ids=token_ids, digest=hash_function(head + array("q", token_ids).tobytes()))


def same_prefix(a: PrefixNode | None, b: PrefixNode | None) -> bool:
    """Whether both stand for the same tokens from the first one on, under the same salt."""
    while a is not b:
        if a is None or b is None or a.token_ids != b.token_ids or a.salt != b.salt:
            return False
        a, b = a.parent, b.parent
    return True
