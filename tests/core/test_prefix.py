import os
import subprocess
import sys

from headrace.core.prefix import PrefixNode, blake2b_digest, make_node, same_prefix


def chain(blocks: list[tuple[int, ...]], salt: str | None = None, hash_function=blake2b_digest) -> PrefixNode:
    node = None
    for block in blocks:
        node = make_node(node, salt, block, hash_function)
    assert node is not None
    return node


def test_digests_differ_with_tokens_parents_and_salt():
    digests = {
        chain([(1, 2)]).digest,
        chain([(2, 1)]).digest,
        chain([(1, 2), (1, 2)]).digest,
        chain([(3, 2), (1, 2)]).digest,
        chain([(1, 2)], salt="a").digest,
        chain([(1, 2)], salt="b").digest,
    }
    assert len(digests) == 6
    assert chain([(1, 2), (3, 4)]).digest == chain([(1, 2), (3, 4)]).digest


def test_equality_is_decided_on_tokens_parents_and_salt_whatever_the_hash():
    def collide(data: bytes) -> bytes:
        return b"same"

    node = chain([(1, 2), (3, 4)], hash_function=collide)
    assert same_prefix(node, chain([(1, 2), (3, 4)], hash_function=collide))
    assert not same_prefix(node, chain([(1, 2), (3, 5)], hash_function=collide))
    assert not same_prefix(node, chain([(9, 2), (3, 4)], hash_function=collide))
    assert not same_prefix(node, chain([(3, 4)], hash_function=collide))
    assert not same_prefix(node, chain([(1, 2), (3, 4)], salt="a", hash_function=collide))
    assert not same_prefix(node, None)


def test_a_surrogate_in_the_salt_is_a_salt():
    assert chain([(1,)], salt="\ud800").digest != chain([(1,)], salt="\ud801").digest


def test_digests_do_not_depend_on_the_hash_seed():
    code = "from headrace.core.prefix import *; print(make_node(None, 'salt', (1, 2, 3), blake2b_digest).digest.hex())"
    texts = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ | {"PYTHONHASHSEED": seed}).stdout
        for seed in ("1", "2")
    }
    assert len(texts) == 1
