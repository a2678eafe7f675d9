"""Forms of answers as grammars: what is accepted, what is refused, and in which words."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from llguidance import LLTokenizer

from headrace.errors import InvalidRequest
from headrace.sampling_params import StructuredOutputs
from headrace.text.grammar import json_rule
from headrace.text.grammar_compiler import compile_matcher, try_out
from headrace.text.grammar_vocabulary import GrammarVocabulary

VOCABULARY = GrammarVocabulary(tokens=(*(bytes([byte]) for byte in range(256)), b"true", b"</s>"), control_token_ids=(257,), end_token_ids=(257,))


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return VOCABULARY.library_tokenizer()


def schema(value: Any) -> StructuredOutputs:
    return StructuredOutputs(kind="json_schema", source=json.dumps(value), param="response_format")


def refused(structured: StructuredOutputs, tokenizer: LLTokenizer) -> str:
    with pytest.raises(InvalidRequest) as caught:
        try_out(structured, tokenizer)
    assert caught.value.param == structured.param
    assert len(caught.value.message) < 500
    return caught.value.message


GOOD = [
    StructuredOutputs(kind="json_object"),
    StructuredOutputs(kind="json_schema", source="true"),
    schema({"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"enum": [1, "x", None]}}}),
    StructuredOutputs(kind="regex", source=r"^[0-9]{3}-\d+/[^]x]{9}$"),
    StructuredOutputs(kind="choice", source='["red", "", "a\\"b\\\\\\u0000\\n"]'),
    StructuredOutputs(kind="grammar", source='start: "a" b\nb: %json {"type": "object"}'),
    StructuredOutputs(kind="grammar", source='root ::= word " and " word\nword ::= "salt" | "pepper"'),
]


@pytest.mark.parametrize("structured", GOOD)
def test_good(structured: StructuredOutputs, tokenizer: LLTokenizer) -> None:
    try_out(structured, tokenizer)


def accepts(structured: StructuredOutputs, text: str, tokenizer: LLTokenizer) -> bool:
    matcher = compile_matcher(structured, tokenizer)
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("structured", "texts", "others"),
    [
        (GOOD[0], ["{}", '{"a": [1, 2], "b":{"c":"\\n"}}'], ["[]", '{ "a":1}', '{"a":  1}', '{"a":1\n}', '{"a":1} ']),
        (GOOD[2], ['{"a": 1}', '{"a":"x"}', "{}"], ['{"a": 2}', '{"a": 1, "other": {}}', '{"b": 1, "a": 1}']),
        (GOOD[3], ["123-4/aaaaaaaaa"], ["123-4", "123-4/aaaa]aaaa", "123-4/aaaaxaaaa", "x123-4/aaaaaaaaa"]),
        (GOOD[4], ["red", "", 'a"b\\\x00\n'], ["re", "redd"]),
        (GOOD[6], ["salt and salt", "pepper and salt"], ["salt", "salt and salty"]),
        (StructuredOutputs(kind="regex", source=r"\d+"), ["123"], ["12\u0663", ""]),
        (StructuredOutputs(kind="regex", source="^é/?$"), ["é", "é/"], ["/", "^é$"]),
        (StructuredOutputs(kind="choice", source='["</s>"]'), ["</s>"], ["<"]),  # the text of the end token, spelt in letters
    ],
)
def test_what_is_kept(structured: StructuredOutputs, texts: list[str], others: list[str], tokenizer: LLTokenizer) -> None:
    assert [text for text in texts if not accepts(structured, text, tokenizer)] == []
    assert [text for text in others if accepts(structured, text, tokenizer)] == []


@pytest.mark.parametrize("keyword", ["not", "uniqueItems", "contains", "if", "dependentRequired", "propertyNames", "unevaluatedProperties"])
def test_keywords_that_cannot_be_enforced_are_named(keyword: str, tokenizer: LLTokenizer) -> None:
    value: Any = True if keyword in ("uniqueItems",) else {"type": "string"}
    assert f"uses {keyword}," in refused(schema({"type": "object", "properties": {"a": {keyword: value}}}), tokenizer)


@pytest.mark.parametrize(
    ("structured", "words"),
    [
        (schema({"type": "notatype"}), "notatype"),
        (schema({"$ref": "#/$defs/missing"}), "$ref points to '/$defs/missing'"),
        (schema({"$ref": "http://a.example/b"}), "$ref points to 'http://a.example/b'"),
        (schema({"type": "string", "pattern": "^hello\\!($"}), "unclosed group"),
        (schema({"type": "string", "pattern": "(?=a)b"}), "look-around"),
        (schema({"type": "string", "format": "foo"}), "format"),
        (schema({"x-guidance": {"lenient": True}, "not": {}}), "x-guidance"),
        (schema(7), "must be a JSON object"),
        (schema("text"), "must be a JSON object"),
        (schema(False), "allows no answer"),
        (schema({"multipleOf": 1000003}), "multipleOf"),
        (schema({"allOf": [{"multipleOf": 97}, {"multipleOf": 89}]}), "multipleOf"),
        (schema({"properties": {f"p{i}": {} for i in range(500)}}), "properties"),
        (StructuredOutputs(kind="json_schema", source="{not"), "not valid JSON"),
        (StructuredOutputs(kind="json_schema", source=""), "not valid JSON"),
        (StructuredOutputs(kind="regex", source="[.*"), "unclosed character class"),
        (StructuredOutputs(kind="choice", source="[]"), "list of texts"),
        (StructuredOutputs(kind="choice", source="[1]"), "list of texts"),
        (StructuredOutputs(kind="choice", source='"red"'), "list of texts"),
        (StructuredOutputs(kind="grammar", source="root ::= ["), "GBNF"),
        (StructuredOutputs(kind="grammar", source='start: "a" b'), "unknown name"),
        (StructuredOutputs(kind="grammar", source='start: "a" <|unknown|>'), "unknown special token"),
        (StructuredOutputs(kind="grammar", source="start: start"), "cannot be completed"),
        (StructuredOutputs(kind="grammar", source='root ::= "a"\n' + "# more\n" * 6000), "at most"),
        (schema({"$ref": "#"}), "cannot be completed"),
        (schema({"oneOf": [{"type": "string"}, {"maxLength": 3}]}), "oneOf"),
    ],
)
def test_bad(structured: StructuredOutputs, words: str, tokenizer: LLTokenizer) -> None:
    assert words in refused(structured, tokenizer)


@pytest.mark.parametrize(
    "structured",
    [
        schema({"description": "x" * 10_000_000}),
        StructuredOutputs(kind="json_schema", source='{"items":' * 10_000 + "{}" + "}" * 10_000),
        StructuredOutputs(kind="json_schema", source='{"items":' * 100 + "{}" + "}" * 100),
        StructuredOutputs(kind="regex", source="a{1000}{1000}"),
        StructuredOutputs(kind="regex", source="(((a{1,100}){1,100}){1,100}){1,100}"),
        schema({"pattern": "([ab]{300}){300}{300}"}),
        schema({"allOf": [{"anyOf": [{"properties": {f"a{i}": {}}}, {"properties": {f"b{i}": {}}}]} for i in range(30)]}),
        StructuredOutputs(kind="grammar", source="root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000),
    ],
)
def test_what_explodes_is_refused_quickly(structured: StructuredOutputs, tokenizer: LLTokenizer) -> None:
    begin = time.thread_time()
    refused(structured, tokenizer)
    assert time.thread_time() - begin < 2.0


def test_a_schema_as_a_part_of_a_grammar(tokenizer: LLTokenizer) -> None:
    rule = json_rule({"type": "object", "required": ["a"]})
    form = StructuredOutputs(kind="grammar", source=f'start: "<call>" body "</call>"\nbody: {rule}')
    assert accepts(form, '<call>{"a": 1}</call>', tokenizer)
    assert not accepts(form, '<call>{\n"a": 1}</call>', tokenizer)
    with pytest.raises(ValueError, match="multipleOf"):
        json_rule({"multipleOf": 1000003})
    with pytest.raises(ValueError, match="JSON object"):
        json_rule([])


def test_forced_text_is_spelt_as_the_model_likes(tokenizer: LLTokenizer) -> None:
    matcher = compile_matcher(StructuredOutputs(kind="choice", source='["true"]'), tokenizer)
    mask = int.from_bytes(matcher.compute_bitmask(), "little")
    assert [token for token in range(258) if mask >> token & 1] == [ord("t"), 256]
