from pathlib import Path

import pytest

from headrace.cli.key_file import api_keys_file
from headrace.cli.settings import server_config
from headrace.config import ApiKey
from headrace.errors import ConfigError


def write(tmp_path: Path, text: str) -> str:
    (tmp_path / "keys.yaml").write_text(text)
    return str(tmp_path / "keys.yaml")


def test_keys_with_and_without_limits(tmp_path: Path):
    text = "- {name: team-a, key: sk-1, requests_per_minute: 60, tokens_per_minute: 1000, priority: 5}\n- name: b\n  key: sk-2\n  weight: 2.5\n"
    keys = api_keys_file(write(tmp_path, text))
    assert keys == (
        ApiKey(name="team-a", key="sk-1", requests_per_minute=60, tokens_per_minute=1000, priority=5),
        ApiKey(name="b", key="sk-2", weight=2.5),
    )
    assert server_config({"api-keys-file": keys}).limited_keys == keys
    with pytest.raises(ConfigError, match="in common"):
        server_config({"api-keys-file": keys, "api-key": ("sk-2",)})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "list of keys"),
        ("a: 1", "list of keys"),
        ("- [", "not YAML"),
        ("- SECRET", "entry 1"),
        ("- {name: a}", "entry 1"),
        ("- {name: a, key: SECRET, rpm: 5}", "requests_per_minute"),
        ("- {name: 'a b', key: SECRET}", "name"),
        ("- {name: a, key: 5}", "key"),
        ("- {name: a, key: ''}", "key"),
        ("- {name: a, key: SECRET, tokens_per_minute: 0}", "tokens_per_minute"),
        ("- {name: a, key: SECRET, requests_per_minute: yes}", "requests_per_minute"),
        ("- {name: a, key: SECRET, priority: high}", "priority"),
        ("- {name: a, key: SECRET, weight: 0}", "weight"),
        ("- {name: a, key: SECRET, weight: .nan}", "weight"),
        ("- {name: a, key: SECRET, weight: heavy}", "weight"),
        ("- {name: a, key: SECRET}\n- {name: a, key: SECRET2}", "same name"),
        ("- {name: a, key: SECRET}\n- {name: b, key: SECRET}", "same key"),
    ],
)
def test_what_is_wrong_is_named_and_no_key_is_said(tmp_path: Path, text: str, says: str):
    with pytest.raises(ValueError, match=says) as refusal:
        api_keys_file(write(tmp_path, text))
    assert "SECRET" not in str(refusal.value).replace("key: SECRET, tokens_per_minute: 100000", "")


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(ValueError, match="cannot be read"):
        api_keys_file(str(tmp_path / "none.yaml"))
