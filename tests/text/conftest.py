from typing import Any

import pytest

from headrace.text.tokenizer import Tokenizer
from tests.text import tiny_tokenizers


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tiny_tokenizers.byte_level(tmp_path_factory.mktemp("byte_level"))


@pytest.fixture(scope="session")
def sentencepiece_model() -> Any:
    return tiny_tokenizers.sentencepiece_model()


@pytest.fixture(scope="session")
def sentencepiece(sentencepiece_model: Any) -> Tokenizer:
    return tiny_tokenizers.from_metadata(tiny_tokenizers.sentencepiece_metadata(sentencepiece_model))
