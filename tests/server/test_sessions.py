"""A conversation over a restart of the serving process."""

from pathlib import Path

import httpx

from tests.patience import LIMIT_S
from tests.server.fakes import write_model
from tests.server.test_serve import Process

MESSAGES = [{"role": "user", "content": "Tell me a long story about the sea, please, and take your time."}]


def serve_once(model: Path, flags: list[str]) -> tuple[dict, str]:
    """Starts a server, takes one turn and ends it with SIGTERM; (the answer, the log)."""
    process = Process(model, *flags)
    try:
        process.wait_ready()
        body = {"messages": MESSAGES, "session_id": "talk", "max_tokens": 20, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        answer = httpx.post(f"{process.url}/v1/chat/completions", json=body, timeout=LIMIT_S, trust_env=False)
        assert answer.status_code == 200, answer.text
        process.popen.terminate()
        assert process.ended() == 0, process.output()
        return answer.json(), process.output()
    finally:
        process.kill()


def test_a_restarted_server_goes_on_from_the_cache(tmp_path):
    model = write_model(tmp_path)
    folder = tmp_path / "sessions"
    flags = ["--session-dir", str(folder), "--session-quota", "1MiB", "--block-size", "8"]
    answers, logs = zip(*(serve_once(model, flags) for _ in range(2)), strict=True)
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    prompt = answers[0]["usage"]["prompt_tokens"]
    assert cached == [0, min(prompt // 8 * 8, prompt - 1)]
    assert answers[0]["choices"][0]["token_ids"] == answers[1]["choices"][0]["token_ids"]
    assert f"sessions kept in {folder}: 1" in logs[0]
    assert f"sessions back from {folder}: 1 of 1" in logs[1]
    (file,) = folder.iterdir()
    file.write_bytes(file.read_bytes()[:-100])
    answer, log = serve_once(model, flags)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert answer["choices"][0]["token_ids"] == answers[0]["choices"][0]["token_ids"]
    assert f"the session file {file} is not used: it is torn" in log
