"""Opening a metadata store by its URL."""

from __future__ import annotations

import builtins
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from pybk.errors import MetadataError, UsageError
from pybk.metadata.lmdb_store import LmdbMetadataStore
from pybk.metadata.url import open_metadata
from tests.certificates import Authority
from tests.private_files import write_private


@pytest.mark.parametrize(
    "url",
    [
        "",
        "/path",
        "lmdb:/",
        "lmdb:///",
        "lmdb://path",
        "lmdb://host/path",
        "lmdb:///path?x=1",
        "lmdb:///path#x",
        "lmdb:///pa%00th",
        "etcd://127.0.0.1:2379/pybk",
        "zk://",
        "zk://127.0.0.1/pybk",
        "zk://127.0.0.1:0/pybk",
        "zk://127.0.0.1:65536/pybk",
        "zk://127.0.0.1:x/pybk",
        "zk://127.0.0.1:2181",
        "zk://127.0.0.1:2181/",
        "zk://127.0.0.1:2181,/pybk",
        "zk://:2181/pybk",
        "zk://127.0.0.1:2181/a//b",
        "zk://127.0.0.1:2181/zookeeper/x",
        "zk://127.0.0.1:2181/../x",
        "zk://[::1/pybk",
        None,
        b"lmdb:///path",
    ],
)
def test_invalid_urls_are_refused_and_the_error_names_the_two_valid_forms(url: Any) -> None:
    with pytest.raises(UsageError) as refused:
        open_metadata(url)
    assert "lmdb:///absolute/path" in str(refused.value)
    assert "zk://host:port" in str(refused.value)


def test_a_password_in_a_url_is_refused_and_not_repeated() -> None:
    for url in (
        "zk://user:sesame@127.0.0.1:2181/pybk",
        "zk://127.0.0.1:2181/pybk?password=sesame",
        "zk://127.0.0.1:2181/pybk?user:sesame",
        "zk://user:sesame@127.0.0.1:2181/pybk#fragment",
        "zk://user:sesame@[::1/pybk",
        "etcd://user:sesame@127.0.0.1:2181/pybk?password=sesame",
    ):
        with pytest.raises(UsageError) as refused:
            open_metadata(url)
        assert "sesame" not in str(refused.value)
        assert "auth_file=FILE" in str(refused.value)


@pytest.mark.parametrize("seconds", [0, -1, 0.01, 4000, float("nan")])
def test_times_are_bounded(seconds: float, tmp_path: Path) -> None:
    for name in ("timeout_s", "lease_time_s"):
        given: dict[str, Any] = {name: seconds}
        with pytest.raises(UsageError, match=name):
            open_metadata(f"lmdb://{tmp_path}/metadata", **given)


def test_a_path_may_have_any_characters(tmp_path: Path) -> None:
    store = open_metadata(f"lmdb://{tmp_path}/me%20ta%25é", timeout_s=3, lease_time_s=2)
    assert isinstance(store, LmdbMetadataStore)
    store.create("key", b"v")
    store.close()
    assert (tmp_path / "me ta%é" / "data.mdb").exists()


def test_directories_are_made_if_that_is_wanted_and_possible(tmp_path: Path) -> None:
    url = f"lmdb://{tmp_path}/missing/metadata"
    with pytest.raises(MetadataError, match=r"there is no metadata store at lmdb:.*missing/metadata: check the URL"):
        open_metadata(url, create=False)
    assert not (tmp_path / "missing").exists()
    open_metadata(url).close()
    open_metadata(url, create=False).close()
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(MetadataError, match="file/metadata cannot be made"):
        open_metadata(f"lmdb://{tmp_path}/file/metadata")


def test_a_missing_client_of_zookeeper_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_kazoo(name: str, *rest: Any) -> Any:
        if name.split(".")[0] == "kazoo":
            raise ModuleNotFoundError("No module named 'kazoo'", name="kazoo")
        return real(name, *rest)

    for name in list(sys.modules):
        if name.split(".")[0] == "kazoo" or name == "pybk.metadata.zookeeper_store":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without_kazoo)
    with pytest.raises(UsageError, match=r"pip install.*pybk\[zookeeper\]"):
        open_metadata("zk://127.0.0.1:2181/pybk")


@pytest.mark.parametrize("query", ["group=", "group", "x=1", "group=a&group=b", "group=a&x=1", "groups=a"])
def test_a_query_other_than_a_group_is_refused(query: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has the query"):
        open_metadata(f"lmdb://{tmp_path}/metadata?{query}")
    with pytest.raises(UsageError, match="unknown setting: for ZooKeeper there are tls_ca"):
        open_metadata(f"zk://127.0.0.1:2181/pybk?{query}")
    assert not any(tmp_path.iterdir())


def test_one_store_is_the_same_with_and_without_its_group(tmp_path: Path) -> None:
    store = open_metadata(f"lmdb://{tmp_path}/metadata?group={os.getegid()}")
    store.create("key", b"v")
    other = open_metadata(f"lmdb://{tmp_path}/metadata")
    found = other.get("key")
    assert found is not None
    assert found.value == b"v"
    for each in (store, other):
        each.close()
    assert {os.stat(file).st_mode & 0o777 for file in (tmp_path / "metadata").iterdir()} == {0o660}


@pytest.mark.parametrize(
    ("query", "told"),
    [
        ("tls_ca=MISSING", "tls_ca 'MISSING' is to hold certificates in PEM.*No such file"),
        ("tls_ca=EMPTY", "tls_ca .* is to hold certificates in PEM"),
        ("tls_cert=MISSING", "tls_cert 'MISSING' and tls_key 'MISSING' are to hold a certificate and its key"),
        ("tls_cert=CERTIFICATE&tls_key=OTHER", "cannot be used.*mismatch"),
        ("tls_cert=ENCRYPTED", "not encrypted, and cannot be used: the key is encrypted"),
        ("tls_key=CERTIFICATE", "tls_key needs tls_cert=FILE"),
        ("tls_verify=none", "tls_verify takes host or chain; to trust one certificate name it by tls_ca"),
        ("tls_ca=", "has the setting tls_ca without a value"),
        ("auth_file=CERTIFICATE&auth_file=CERTIFICATE", "has the setting auth_file twice"),
        ("auth_file=MISSING", "MISSING is to hold a password or a secret, and cannot be read"),
        ("auth_file=EMPTY", "is to hold user:password for ZooKeeper"),
        ("auth_file=SECRET", "is to hold user:password for ZooKeeper"),
        ("auth_file=SHARED", "lets every user of this host read or change it: chmod 600"),
        ("acl=x509", "acl=x509 needs tls_cert=FILE"),
        ("acl=x509&tls_cert=CERTIFICATE&auth_file=SECRET", "exclude each other"),
        ("acl=digest", "acl takes x509 alone; for a user and password name auth_file=FILE"),
    ],
)
def test_invalid_settings_of_zookeeper_are_refused_with_the_remedy(query: str, told: str, tmp_path: Path) -> None:
    pytest.importorskip("kazoo")
    authority = Authority(tmp_path)
    write_private(tmp_path / "empty", b"")
    write_private(tmp_path / "secret", b"sesame")
    write_private(tmp_path / "shared", b"pybk:sesame").chmod(0o644)
    for name, path in (
        ("CERTIFICATE", authority.sign("certificate")),
        ("OTHER", authority.sign("other")),
        ("ENCRYPTED", authority.sign("encrypted", password=b"sesame")),
        ("EMPTY", tmp_path / "empty"),
        ("SECRET", tmp_path / "secret"),
        ("SHARED", tmp_path / "shared"),
    ):
        query = query.replace(f"={name}", f"={path}")
    with pytest.raises(UsageError, match=told) as refused:
        open_metadata(f"zk://127.0.0.1:2181/pybk?{query}")
    assert "sesame" not in str(refused.value)
