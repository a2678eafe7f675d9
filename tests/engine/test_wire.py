"""Every message survives the wire unchanged; nothing else gets through."""

import socket
import struct
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config import EngineConfig, EngineInfo
from headrace.core.explain import Difference, Explanation, Query
from headrace.core.messages import AbortRequest, AddRequest, SchedulerStats, TokenLogprobs, TokenOutput
from headrace.engine import wire
from headrace.observe.work import KINDS, TOKEN_KINDS, PathWork, Work
from headrace.sampling_params import SamplingParams, StructuredOutputs
from headrace.text.grammar_vocabulary import GrammarVocabulary

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
TOKEN = st.integers(0, 2**31)
TOKENS = st.lists(TOKEN, max_size=5).map(tuple)
NUMBER = st.floats(allow_nan=False, allow_infinity=False)
COUNT = st.integers(0, 2**40)

PARAMS = st.builds(
    SamplingParams,
    n=st.integers(1, 5),
    temperature=st.floats(0, 2),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(-1, 100),
    logit_bias=st.none() | st.dictionaries(TOKEN, st.floats(-100, 100), max_size=3),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    max_tokens=st.none() | st.integers(5, 1000),
    min_tokens=st.integers(0, 5),
    stop=st.lists(TEXT.filter(bool), max_size=2).map(tuple),
    stop_token_ids=TOKENS,
    bad_words_ids=st.lists(TOKENS, max_size=2).map(tuple),
    allowed_token_ids=st.none() | TOKENS.filter(bool),
    logprobs=st.none() | st.integers(0, 20),
    structured=st.none() | st.builds(StructuredOutputs, kind=st.sampled_from(["json_schema", "choice"]), source=TEXT, param=TEXT),
)
ADDS = st.builds(
    AddRequest,
    request_id=TEXT,
    prompt_token_ids=TOKENS,
    params=PARAMS,
    arrival=NUMBER,
    eos_token_ids=TOKENS,
    priority=st.integers(-(2**63), 2**63 - 1),
    deadline=st.none() | NUMBER,
    tenant=TEXT,
    cache_salt=st.none() | TEXT,
    session_id=st.none() | TEXT,
    fork_of=st.none() | TEXT,
    background=st.booleans(),
    pooling=st.sampled_from([None, "last", "mean"]),
)
LOGPROBS = st.builds(
    TokenLogprobs, token_id=TOKEN, logprob=NUMBER, rank=st.integers(1, 10**6), top=st.lists(st.tuples(TOKEN, NUMBER), max_size=3).map(tuple)
)
SCORES = st.none() | st.lists(LOGPROBS, max_size=3).map(tuple)
OUTPUTS = st.builds(
    TokenOutput,
    request_id=TEXT,
    token_ids=TOKENS,
    logprobs=SCORES,
    prompt_logprobs=SCORES,
    cached_tokens=st.none() | COUNT,
    pooled=st.none() | st.binary(max_size=8),
    finish_reason=st.sampled_from([None, "stop", "length", "abort", "error"]),
    stop_reason=st.none() | TOKEN,
    ends_in_text=st.booleans(),
    error_code=st.none() | TEXT,
    error_message=st.none() | TEXT,
    num_preemptions=COUNT,
)
VOCABULARIES = st.builds(
    GrammarVocabulary, tokens=st.lists(st.binary(max_size=4), max_size=5).map(tuple), control_token_ids=TOKENS, end_token_ids=TOKENS
)
STATS = st.builds(SchedulerStats, **dict.fromkeys(SchedulerStats.__slots__, COUNT))
CONFIGS = st.builds(
    EngineConfig,
    model=TEXT,
    kv_memory=st.none() | COUNT,
    target_itl_ms=st.none() | st.floats(1, 100),
    preemption_mode=st.sampled_from(["auto", "swap"]),
)
INFOS = st.builds(
    EngineInfo,
    model=TEXT,
    max_model_len=COUNT,
    vocab_size=COUNT,
    embedding_size=COUNT,
    num_blocks=COUNT,
    block_size=COUNT,
    dtype=TEXT,
    device=TEXT,
    threads=COUNT,
    path=TEXT,
    kv_cache_dtype=TEXT,
    kv_bytes=COUNT,
    weight_bytes=COUNT,
    load_seconds=NUMBER,
)


QUERIES = st.builds(Query, query_id=COUNT, token_ids=TOKENS, cache_salt=st.none() | TEXT, tenant=TEXT)
EXPLANATIONS = st.builds(
    Explanation,
    query_id=COUNT,
    num_tokens=COUNT,
    block_size=COUNT,
    cached_blocks=COUNT,
    cached_tokens=COUNT,
    reason=st.sampled_from(["cached", "never_seen"]),
    difference=st.none() | st.builds(Difference, position=COUNT, cached_token_id=TOKEN, prompt_token_id=TOKEN),
    evicted_s=st.none() | NUMBER,
    awaited_tokens=st.none() | COUNT,
)

PATH_WORK = st.builds(
    PathWork,
    steps=COUNT,
    tokens=st.fixed_dictionaries(dict.fromkeys(TOKEN_KINDS, COUNT)),
    seconds=st.fixed_dictionaries(dict.fromkeys(KINDS[:-2], NUMBER)),
)
WORK = st.builds(Work, paths=st.dictionaries(TEXT, PATH_WORK, max_size=2), between=st.fixed_dictionaries(dict.fromkeys(KINDS[-3:], NUMBER)))
TRACED_ROWS = st.lists(st.builds(wire.TracedRow, TEXT, COUNT, COUNT, COUNT, st.booleans()), max_size=3).map(tuple)
STEP_TRACES = st.builds(wire.StepTrace, COUNT, *[NUMBER] * 6, TEXT, COUNT, TRACED_ROWS)


def body(frame: bytes) -> bytes:
    assert wire.body_length(frame[: wire.HEADER_BYTES]) == len(frame) - wire.HEADER_BYTES
    return frame[wire.HEADER_BYTES :]


@given(
    st.builds(wire.Configure, CONFIGS)
    | st.builds(wire.Add, ADDS)
    | st.builds(wire.Abort, st.builds(AbortRequest, request_id=TEXT, reason=st.sampled_from(["abort", "stop"])))
    | st.just(wire.Shutdown())
    | st.builds(wire.Vocabulary, VOCABULARIES)
    | st.builds(wire.Explain, QUERIES)
    | st.builds(wire.Record, NUMBER)
)
def test_messages_to_the_engine(message):
    assert wire.decode_to_engine(body(wire.encode_frame(message))) == message


@given(
    st.builds(wire.Started, INFOS, STATS)
    | st.builds(wire.Failed, TEXT, TEXT, st.integers(0, 255))
    | st.builds(wire.Outputs, st.lists(OUTPUTS, max_size=4).map(tuple), st.none() | st.integers(1, 100))
    | st.builds(wire.Heartbeat, STATS, st.none() | NUMBER, COUNT, NUMBER, NUMBER, WORK)
    | st.builds(wire.Explained, EXPLANATIONS)
    | STEP_TRACES
)
def test_messages_from_the_engine(message):
    assert wire.decode_from_engine(body(wire.encode_frame(message))) == message


@given(st.binary(max_size=64))
def test_any_bytes_are_a_message_or_a_wire_error(data):
    for decode, kinds in ((wire.decode_to_engine, wire.ToEngine), (wire.decode_from_engine, wire.FromEngine)):
        try:
            message = decode(data)
        except wire.WireError:
            continue
        assert isinstance(message, kinds)


def test_directions_do_not_mix():
    with pytest.raises(wire.WireError, match="cannot be decoded"):
        wire.decode_from_engine(body(wire.encode_frame(wire.Shutdown())))


@pytest.mark.parametrize("length", [0, wire.MAX_FRAME_BYTES + 1, 2**32 - 1])
def test_absurd_lengths_are_refused_before_memory_is_taken(length):
    with pytest.raises(wire.WireError, match=f"{length} bytes"):
        wire.body_length(struct.pack("<I", length))


@pytest.mark.parametrize(("field", "value"), [("session_id", "\ud800"), ("priority", 2**70)])
def test_what_msgpack_cannot_carry(field, value):
    request = AddRequest(request_id="a", prompt_token_ids=(1,), params=SamplingParams(), arrival=0.0, **{field: value})
    with pytest.raises(wire.WireError, match="Add cannot be encoded"):
        wire.encode_frame(wire.Add(request))


def test_frames_over_a_socket_in_pieces():
    """A reader gets whole bodies however the bytes are cut, and None at the end, also in mid-frame."""
    ours, theirs = socket.socketpair()
    frames = [wire.encode_frame(wire.Failed("StartError", "x" * size, 1)) for size in (0, 10, 300_000)]

    def send() -> None:
        data = b"".join(frames) + frames[0][:6]
        for start in range(0, len(data), 7001):
            ours.sendall(data[start : start + 7001])
        ours.close()

    sender = threading.Thread(target=send)
    sender.start()
    with theirs:
        for frame in frames:
            received = wire.read_body(theirs)
            assert received is not None
            assert bytes(received) == body(frame)
        assert wire.read_body(theirs) is None
    sender.join()
