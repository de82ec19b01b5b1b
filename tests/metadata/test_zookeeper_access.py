"""ZooKeeper with TLS and access control lists, on a real server."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest

from pybk import LedgerManager
from pybk.admin.cli import main
from pybk.errors import MetadataError, MetadataUnreachableError
from pybk.metadata.store import MetadataStore
from pybk.metadata.url import open_metadata
from tests.certificates import Authority
from tests.metadata.harness import Mirror, versions_below, wait_for
from tests.metadata.records import cluster_on, ledger
from tests.private_files import write_private
from tests.waiting import WAIT_S
from tests.zookeeper_server import LONG_SESSION_S, ZooKeeperServer, missing

if missing() is None:
    from kazoo.client import KazooClient
    from kazoo.exceptions import NoAuthError
    from kazoo.security import OPEN_ACL_UNSAFE

    from pybk.metadata.zookeeper_store import ZooKeeperMetadataStore

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.sampled(one_in=4, using="secured"),
]

SOON_S = (2.0, 8.0, 32.0)
"""The deadlines of calls that are to fail, one after the other: a busy machine may not get to the cause at first."""


class Secured(NamedTuple):
    """A server with TLS, and what clients need."""

    server: ZooKeeperServer
    authority: Authority
    client: Path
    directory: Path

    def url(self, *settings: str, path: str | None = None, host: str | None = None) -> str:
        """Return a URL for TLS."""
        own = [f"tls_ca={self.authority.file}", f"tls_cert={self.client}"]
        return f"zk://{host or self.server.tls_host}{path or self.server.path()}?{'&'.join([*own, *settings])}"

    def auth(self, text: str = "pybk:sesame") -> str:
        """Write a file with a user and password; returns the setting."""
        file = self.directory / f"auth-{len(text)}"
        write_private(file, f"{text}\n".encode())
        return f"auth_file={file}"


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """A server with TLS for all tests of this module."""
    directory = tmp_path_factory.mktemp("certificates")
    authority = Authority(directory)
    server = ZooKeeperServer(authority.sign("server"), authority.file, longest_session_s=LONG_SESSION_S)
    try:
        server.start()
        opened(f"zk://{server.host}/pybk").close()  # the parent of all paths belongs to nobody, whichever test is first
        yield Secured(server, authority, authority.sign("client"), directory)
    finally:
        server.close()


def opened(url: str, timeout_s: float = WAIT_S) -> ZooKeeperMetadataStore:
    """Open a store."""
    store = open_metadata(url, timeout_s=timeout_s)
    assert isinstance(store, ZooKeeperMetadataStore)
    return store


def refused(url: str, why: str) -> None:
    """Check that a store cannot be opened, for a reason."""
    said = []
    for timeout_s in SOON_S:
        with pytest.raises(MetadataUnreachableError) as found:
            opened(url, timeout_s)
        said.append(str(found.value))
        if re.search(why, said[-1]):
            return
    raise AssertionError(f"{why!r} is not in {said}")


def use_all(store: MetadataStore) -> None:
    """Make keys in all the ways there are."""
    version = store.create("a/b/c", b"v")
    store.create("leased", b"v", leased=True)
    store.put("a/b/c", b"w", version, reused=True)
    found = store.get("a/b/c", latest=True)
    assert found is not None
    store.rename("a/b/c", "a/b/d", b"x", found.version)
    assert store.children("a/b") == ["d"]
    cluster_on(store).create_ledger(ledger(1))


def test_a_store_works_with_tls(secured: Secured) -> None:
    with closing(opened(secured.url())) as store, closing(opened(secured.url(path=store_path(store)))) as other:
        use_all(store)
        mirror = Mirror(other, "many")
        made = [store.client.create_async(f"{store.root}/many/{number}", b"v") for number in [0]]
        assert len(made) == 1
        for number in range(600):
            store.create(f"many/{number:04d}/x", b"v" * 100)
        assert wait_for(lambda: mirror.versions == versions_below(store, "many"))
        assert (
            sum(node is not None for node in other.get_many([f"many/{number:04d}/x" for number in range(900)])) == 600
        )


def store_path(store: ZooKeeperMetadataStore) -> str:
    return store.root


def test_a_large_answer_is_read_with_tls(secured: Secured) -> None:
    with closing(opened(secured.url())) as store:
        for number in range(20):
            store.create(f"large/{number}", b"v" * 300_000)
        found = store.get_many([f"large/{number}" for number in range(20)])
        assert {len(node.value) for node in found if node is not None} == {300_000}
        assert len(found) == 20


def test_an_authority_that_did_not_sign_the_servers_certificate_is_named(secured: Secured, tmp_path: Path) -> None:
    other = Authority(tmp_path, "other")
    url = f"zk://{secured.server.tls_host}/pybk/x?tls_ca={other.file}&tls_cert={secured.client}"
    refused(url, "tls_ca must name the authority")


def test_a_server_of_another_name_is_refused_unless_only_the_chain_is_verified(secured: Secured) -> None:
    host = f"localhost:{secured.server.tls_host.rpartition(':')[2]}"
    refused(secured.url(host=host), r"name the servers in the URL as their certificates do")
    opened(secured.url("tls_verify=chain", host=host)).close()


@pytest.mark.parametrize("certificate", [False, True])
def test_a_client_without_a_certificate_of_the_servers_authority_is_refused(
    secured: Secured, tmp_path: Path, certificate: bool
) -> None:
    url = f"zk://{secured.server.tls_host}/pybk/x?tls_ca={secured.authority.file}"
    if certificate:
        url += f"&tls_cert={Authority(tmp_path, 'other').sign('rogue')}"
    refused(url, "check tls_cert and tls_key")


def test_the_wrong_port_is_explained(secured: Secured) -> None:
    refused(secured.url(host=secured.server.host), "secureClientPort")
    refused(f"zk://{secured.server.tls_host}/pybk/x", "name tls_ca=FILE in the URL")


@pytest.mark.parametrize("kind", ["digest", "x509"])
def test_all_znodes_belong_to_the_members_alone(secured: Secured, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = "acl=x509" if kind == "x509" else secured.auth()
    with closing(opened(secured.url(settings))) as store:
        use_all(store)
        assert store.foreign_znodes() == []
        paths = [store.root, *(f"{store.root}/{key}" for key in ("a", "a/b", "a/b/d", "leased", "cluster", "ledgers"))]
        for path in paths:
            (found,) = store.client.get_acls(path)[0]
            assert (found.id.scheme, found.acl_list) == (kind, ["ALL"])
        mirror = Mirror(store, "a")
        with closing(opened(secured.url(settings, path=store.root))) as member:
            assert member.get("a/b/d") is not None
            member.create("a/e", b"v")
        assert wait_for(lambda: "a/e" in mirror.versions)
        stranger = KazooClient(secured.server.host)
        stranger.start()
        for call in (stranger.get, stranger.get_children, stranger.delete, stranger.get_acls):
            with pytest.raises(NoAuthError):
                call(f"{store.root}/a/b/d")
        stranger.stop()
        stranger.close()


def test_a_cluster_runs_with_tls_and_an_owner_and_needs_nothing_but_its_url(
    secured: Secured, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = secured.url(secured.auth())
    secret = b"secret of the cluster"
    with (
        closing(LedgerManager.open(tmp_path / "node", listen="tcp://127.0.0.1:*", metadata=url, cluster_secret=secret)),
        closing(LedgerManager.connect(url, cluster_secret=secret)) as client,
    ):
        with client.create_ledger(ensemble_size=1, write_quorum=1, ack_quorum=1, password=b"p") as writer:
            writer.append(b"entry")
        write_private(tmp_path / "secret", secret)
        assert main(["upgrade", url, "--cluster-secret-file", str(tmp_path / "secret")]) == 0
    assert "level" in capsys.readouterr().out
    assert main(["permissions", url]) == 0


def test_those_who_are_not_members_are_told_what_to_check(secured: Secured, tmp_path: Path) -> None:
    with closing(opened(secured.url(secured.auth()))) as store:
        for settings in (secured.auth("pybk:else"), "acl=x509"):
            with pytest.raises(MetadataError, match=r"belong to another identity than that of this process, .*check"):
                opened(secured.url(settings, path=store.root))
        with pytest.raises(MetadataError, match="the URL has neither auth_file nor acl"):
            opened(f"zk://{secured.server.host}{store.root}").get("cluster")
    with closing(opened(secured.url("acl=x509"))) as store:
        other = secured.authority.sign("other-member")
        url = f"zk://{secured.server.tls_host}{store.root}?tls_ca={secured.authority.file}&tls_cert={other}&acl=x509"
        with pytest.raises(MetadataError, match=f"the certificate {other}; check"):
            opened(url)


def test_a_user_from_the_environment_is_the_one_of_a_file(secured: Secured, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(opened(secured.url(secured.auth()))) as store:
        store.create("key", b"v")
        for name, value in (
            ("PYBK_ZOOKEEPER_AUTH", "pybk:sesame"),
            ("PYBK_ZOOKEEPER_AUTH_FILE", secured.auth().partition("=")[2]),
        ):
            with monkeypatch.context() as patch:
                patch.setenv(name, value)
                with closing(opened(f"zk://{secured.server.host}{store.root}")) as other:
                    assert other.get("key") is not None
                    assert other.foreign_znodes() == []


def test_znodes_of_others_are_found_and_changed(
    secured: Secured, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    path = secured.server.path()
    with closing(opened(f"zk://{secured.server.host}{path}")) as store:
        use_all(store)
        before = versions_below(store, "a")
    url = secured.url(secured.auth(), path=path)
    with closing(opened(url)) as store:
        (told,) = [record.getMessage() for record in caplog.records if "does not belong" in record.getMessage()]
        assert "pybk permissions URL" in told
        store.create("a/mine", b"v")
    assert main(["permissions", url]) == 1
    printed = capsys.readouterr().out
    assert f"{path}/a/b/d: for world:anyone ALL; differs" in printed
    assert f"{path}/a/mine" not in printed
    assert "--narrow" in printed
    assert main(["permissions", url, "--narrow", "--json"]) == 0
    told_json = json.loads(capsys.readouterr().out)
    assert f"{path}/a/b/d" in [one["path"] for one in told_json["differences"]]
    assert main(["permissions", url]) == 0
    assert "all znodes are for user 'pybk'" in capsys.readouterr().out
    with closing(opened(url)) as store:
        after = versions_below(store, "a")
        assert {key: after[key] for key in before} == before
        store.client.set_acls(f"{path}/a", OPEN_ACL_UNSAFE)
        assert [(one.path, one.problem) for one in store.foreign_znodes()] == [(f"{path}/a", None)]
    for arguments in (["permissions", secured.server.url()], ["permissions", url, "--group", "staff"]):
        assert main(arguments) not in (0, 1)
        assert "name the owner" in capsys.readouterr().err


def test_no_secret_is_logged_or_shown(secured: Secured, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(1)
    logging.getLogger("kazoo").setLevel(1)
    try:
        with closing(opened(secured.url(secured.auth()))) as store:
            use_all(store)
            digest = store.client.get_acls(store.root)[0][0].id.id.partition(":")[2]
            shown = repr(store.access) + str(store.access) + repr(vars(store))
    finally:
        logging.getLogger("kazoo").setLevel(logging.NOTSET)
    logged = caplog.text
    assert "Sending request" in logged, "kazoo's log is on"
    for secret in ("sesame", digest, "session_passwd"):
        assert secret not in logged
        assert secret not in shown
