"""The store on a folder and on a real S3 server: publish, read, ranges, folders, pointers, processes."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import pickle
from multiprocessing.context import ForkContext, SpawnContext
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mar_grpo import store as store_module
from mar_grpo.errors import InputError
from mar_grpo.store import FileEntry, Store, canonical_json, parse_json, read_uri, store_for
from mar_grpo.transports import S3Objects


@pytest.mark.parametrize("key", ["a", "deep/er/ü ä+&?=#%.bin", "runs/x/steps/1.json"])
@pytest.mark.parametrize("data", [b"", b"\x00\xff" * 500])
def test_what_is_written_is_read(store: Store, key: str, data: bytes) -> None:
    entry = store.write_bytes(key, data)
    assert entry.uri == store.uri(key)
    assert (entry.bytes, entry.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert store.read_bytes(key) == data
    assert store.read_bytes(key, sha256=entry.sha256) == data
    assert read_uri(entry.uri, sha256=entry.sha256) == data
    assert store.stat(key) == (entry.bytes, entry.etag)
    assert store.entry(key) == entry
    assert store.list() == [key]


def test_a_write_replaces(store: Store) -> None:
    first = store.write_bytes("key", b"first, and longer")
    second = store.write_bytes("key", b"second")
    assert store.read_bytes("key") == b"second"
    assert first.etag != second.etag
    assert store.list() == ["key"]


def test_exists_and_delete(store: Store) -> None:
    store.write_bytes("folder/key", b"1")
    assert store.exists("folder/key")
    assert not store.exists("folder")
    assert not store.exists("folder/key/below")
    assert not store.exists("other")
    store.delete("folder/key")
    store.delete("folder/key")
    assert not store.exists("folder/key")
    with pytest.raises(InputError, match=r"does not exist.*folder/key"):
        store.read_bytes("folder/key")


def test_list_is_sorted_recursive_and_by_whole_folder_names(store: Store) -> None:
    for key in ("b/2", "a", "b/1", "b/c/3", "bb/4"):
        store.write_bytes(key, b"x")
    assert store.list() == ["a", "b/1", "b/2", "b/c/3", "bb/4"]
    assert store.list("b") == store.list("b/") == ["b/1", "b/2", "b/c/3"]
    assert store.list("none") == []


def test_a_long_listing_takes_several_pages(s3_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(S3Objects, "page_keys", 2)
    keys = [f"k/{index}" for index in range(5)]
    for key in keys:
        s3_store.write_bytes(key, b"x")
    assert s3_store.list() == keys


def test_objects_of_many_blocks(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "BLOCK_BYTES", 1000)
    data = os.urandom(3500)
    entry = store.write_bytes("key", data)
    assert store.read_bytes("key", sha256=entry.sha256) == data
    assert store.get_file("key", tmp_path / "new" / "file", sha256=entry.sha256).read_bytes() == data


def test_a_multipart_upload(s3_store: Store, tmp_path: Path) -> None:
    source = tmp_path / "big"
    with open(source, "wb") as file:
        file.truncate(101 * 2**20)
    entry = s3_store.put_file(source, "big")
    assert entry.bytes == 101 * 2**20
    assert entry.etag.endswith("-3"), "three parts of at most 50 MiB"


def test_ranges(store: Store) -> None:
    entry = store.write_bytes("key", bytes(range(100)))
    assert store.read_range("key", 10, 5) == bytes(range(10, 15))
    assert store.read_range("key", 95, 5, entry.etag) == bytes(range(95, 100))
    assert store.read_range("key", 3, 0) == b""
    for start, length in ((95, 6), (100, 1), (5000, 10)):
        with pytest.raises(InputError, match=r"too short.*key"):
            store.read_range("key", start, length)
    for start, length in ((-1, 5), (0, -1)):
        with pytest.raises(InputError, match="makes no sense"):
            store.read_range("key", start, length)


def test_files_and_folders(store: Store, tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name, data in {"config.json": b"{}", "unet/weights.bin": b"w" * 10, ".hidden": b"h"}.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(data)
    entries = store.put_folder(source, "model")
    assert [entry.uri for entry in entries] == [store.uri(key) for key in store.list("model")]
    assert store.list("model") == ["model/.hidden", "model/config.json", "model/unet/weights.bin"]
    copied = store.get_folder("model", tmp_path / "copy")
    assert {path.relative_to(tmp_path / "copy").as_posix(): path.read_bytes() for path in copied} == {
        ".hidden": b"h",
        "config.json": b"{}",
        "unet/weights.bin": b"w" * 10,
    }
    with pytest.raises(InputError, match="empty or does not exist"):
        store.get_folder("nothing", tmp_path / "none")
    (tmp_path / "bare").mkdir()
    with pytest.raises(InputError, match="holds no files"):
        store.put_folder(tmp_path / "bare", "bare")
    with pytest.raises(InputError, match=r"does not exist.*absent"):
        store.put_file(tmp_path / "absent", "absent")


def test_json_is_canonical_and_finite(store: Store) -> None:
    store.write_json("a.json", {"b": [1, 2.5, None], "a": "ü"})
    assert store.read_bytes("a.json") == '{"a":"ü","b":[1,2.5,null]}'.encode()
    assert store.read_json("a.json") == {"a": "ü", "b": [1, 2.5, None]}
    with pytest.raises(InputError, match=r"cannot be written as JSON.*nan.json"):
        store.write_json("nan.json", {"loss": float("nan")})
    assert not store.exists("nan.json")


@pytest.mark.parametrize("data", [b"{", b"\xff\xfe", b'{"a": NaN}', b"[Infinity]", b""])
def test_bad_json_is_refused(file_store: Store, data: bytes) -> None:
    file_store.write_bytes("bad.json", data)
    with pytest.raises(InputError, match=r"not valid JSON.*bad.json"):
        file_store.read_json("bad.json")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(JSON)
def test_canonical_json_is_a_fixed_point(data: object) -> None:
    try:
        first = canonical_json(data)
    except InputError:
        assert "\\ud" in json.dumps(data)  # lone surrogates have no UTF-8 form
        return
    assert parse_json(first, where="") == data
    assert canonical_json(parse_json(first, where="")) == first


def test_pointers(store: Store) -> None:
    target = store.write_bytes("weights", b"w" * 100)
    store.write_pointer("LATEST", target)
    assert store.read_pointer("LATEST") == target
    store.write_bytes("plain.json", b'{"a":1}')
    with pytest.raises(InputError, match=r"not a pointer.*plain.json"):
        store.read_pointer("plain.json")


def test_a_pointer_to_something_else_is_never_written(store: Store) -> None:
    target = store.write_bytes("weights", b"w" * 100)
    store.write_bytes("weights", b"x" * 100)
    with pytest.raises(InputError, match=r"pointer cannot be written.*weights"):
        store.write_pointer("LATEST", target)
    with pytest.raises(InputError, match=r"does not exist.*gone"):
        store.write_pointer("LATEST", target.model_copy(update={"uri": store.uri("gone")}))
    assert not store.exists("LATEST")


def test_a_pointer_crosses_stores(file_store: Store, s3_store: Store) -> None:
    target = s3_store.write_bytes("weights", b"w")
    file_store.write_pointer("champion.json", target)
    assert file_store.read_pointer("champion.json") == target


def test_a_wrong_digest_is_an_error_and_leaves_no_file(store: Store, tmp_path: Path) -> None:
    entry = store.write_bytes("key", b"content")
    store.write_bytes("key", b"CONTENT")
    with pytest.raises(InputError, match=r"content is not the expected one.*key"):
        store.read_bytes("key", sha256=entry.sha256)
    with pytest.raises(InputError, match=r"content is not the expected one.*key"):
        store.get_file("key", tmp_path / "out" / "file", sha256=entry.sha256)
    assert list((tmp_path / "out").iterdir()) == []


def test_preflight_leaves_nothing(store: Store) -> None:
    store.preflight()
    assert store.list() == []


def test_make_root_may_be_repeated(store: Store) -> None:
    store.make_root()
    store.write_bytes("key", b"1")
    store.make_root()
    assert store.list() == ["key"]


@pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "..", "a/../b", "./a", "a\x00b"])
def test_bad_keys(file_store: Store, key: str) -> None:
    with pytest.raises(InputError, match="key"):
        file_store.write_bytes(key, b"1")


@pytest.mark.parametrize(
    ("uri", "root", "key"),
    [
        ("s3://bucket/a/b.json", "s3://bucket", "a/b.json"),
        ("file:///data/x/b.json", "file:///data/x", "b.json"),
        ("/data/x/b.json", "file:///data/x", "b.json"),
        ("file:///b.json", "file:///", "b.json"),
    ],
)
def test_store_for(uri: str, root: str, key: str) -> None:
    store, found = store_for(uri)
    assert (store.uri(), found) == (root, key)
    assert store.key(store.uri(key)) == key
    assert store.uri(key) == (uri if "://" in uri else f"file://{uri}")


@pytest.mark.parametrize("uri", ["s3://bucket", "s3://", "gs://bucket/key", "file://data/key", "s3:///key"])
def test_bad_uris(uri: str) -> None:
    with pytest.raises(InputError, match=uri):
        store_for(uri)


def test_a_plain_relative_path_is_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Store("here").uri() == f"file://{tmp_path}/here"


def test_a_foreign_uri_has_no_key(file_store: Store) -> None:
    with pytest.raises(InputError, match="does not lie in this store"):
        file_store.key(file_store.uri() + "-other/key")


def _read_in_child(store: Store, queue: multiprocessing.Queue[bytes]) -> None:
    queue.put(store.read_bytes("key"))


@pytest.mark.parametrize("context", [multiprocessing.get_context("fork"), multiprocessing.get_context("spawn")])
def test_a_used_store_works_in_a_child_process(store: Store, context: ForkContext | SpawnContext) -> None:
    store.write_bytes("key", b"content")
    queue: multiprocessing.Queue[bytes] = context.Queue()
    child = context.Process(target=_read_in_child, args=(store, queue))
    child.start()
    try:
        assert queue.get(timeout=30) == b"content"
    finally:
        child.join(10)
        child.kill()
    assert store.read_bytes("key") == b"content"


def test_a_pickled_store_keeps_its_settings(file_store: Store) -> None:
    copy = pickle.loads(pickle.dumps(file_store))
    assert (copy.uri(), copy.retry_seconds) == (file_store.uri(), file_store.retry_seconds)


def test_file_permissions_follow_the_umask(file_store: Store) -> None:
    before = os.umask(0o027)
    try:
        file_store.write_bytes("key", b"1")
    finally:
        os.umask(before)
    path = Path(file_store.root) / "key"
    assert path.stat().st_mode & 0o777 == 0o640


def test_an_entry_survives_json(file_store: Store) -> None:
    entry = file_store.write_bytes("key", b"1")
    assert FileEntry.model_validate_json(entry.model_dump_json()) == entry
