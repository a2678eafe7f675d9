import pytest

from headrace.text.tokenizer import Tokenizer
from tests.engine.byte_tokenizer import byte_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))
