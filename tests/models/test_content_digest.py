from headrace.models.content_digest import SAMPLE_BYTES, content_digest


def test_the_digest_follows_the_content_and_not_the_place(tmp_path):
    digests = []
    for name, middle in (("a", 0), ("b", 0), ("c", 1)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        weights = bytearray(10 * SAMPLE_BYTES + 7)
        weights[5 * SAMPLE_BYTES] = middle
        (folder / "model.safetensors").write_bytes(weights)
        (folder / "notes.txt").write_text(name)
        digests.append(content_digest(str(folder)))
    assert digests[0] == digests[1] != digests[2]
    (tmp_path / "a" / "config.json").write_text("{ }")
    assert content_digest(str(tmp_path / "a")) != digests[0]


def test_the_end_of_a_large_file_counts_and_a_file_alone_is_a_model(tmp_path):
    file = tmp_path / "m.gguf"
    data = bytearray(200 * SAMPLE_BYTES + 1)
    file.write_bytes(data)
    before = content_digest(str(file))
    data[-1] = 1
    file.write_bytes(data)
    assert content_digest(str(file)) != before
    file.write_bytes(b"")
    assert content_digest(str(file)) != before
