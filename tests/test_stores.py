"""The same calls on a local directory and on a bucket of moto's S3 server."""

import pytest

from stores import Store, lance_options


@pytest.fixture(params=["local", "s3"])
def store(request, tmp_path) -> Store:
    where = request.getfixturevalue("bucket") if request.param == "s3" else tmp_path
    return Store(f"{where}/stores/", "--out")


def test_what_is_written_is_read_measured_and_removed(store):
    assert not store.exists()
    store.remove()  # of nothing
    for name in ("a", "b"):
        (store / name).make()
        (store / name / "data").write(name.encode() * 10)
    assert (store / "b" / "data").read() == b"bbbbbbbbbb"
    (store / "b" / "data").write(b"bbb")
    assert (store / "b" / "data").read() == b"bbb"
    assert store.size() == 13 and (store / "a").size() == 10
    (store / "a").remove()
    assert not (store / "a" / "data").exists() and (store / "b" / "data").exists()
    with pytest.raises(FileNotFoundError):
        (store / "a" / "data").read()


def test_only_local_ones_are_paths(tmp_path, bucket):
    (Store(tmp_path, "--out") / "x").write(b"1")
    (Store(tmp_path, "--out") / "y").write(b"2")
    (Store(tmp_path, "--out") / "x").become(Store(tmp_path / "y", "--out"))
    with open(Store(tmp_path, "--out") / "y") as file:
        assert file.read() == "1" and not (tmp_path / "x").exists()
    with pytest.raises(TypeError, match="s3://blocks/y is not a local path"):
        open(Store(bucket, "--out") / "y")


@pytest.mark.parametrize("where", ["gs://bucket/x", "s3://", "s3:///x", "http://host/x"])
def test_other_addresses_are_refused_in_one_line(where):
    with pytest.raises(SystemExit, match=f"--out {where}: ") as refused:
        Store(where, "--out")
    assert "\n" not in str(refused.value)


def test_lance_is_told_of_an_endpoint_without_tls(monkeypatch):
    for endpoint, options in (
        ("http://127.0.0.1:9000", {"allow_http": "true"}),
        ("https://minio.example", None),
    ):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        assert lance_options() == options
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    assert lance_options() is None
