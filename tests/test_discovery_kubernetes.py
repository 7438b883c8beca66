"""Pods as a real API server tells of them, over real sockets, with everything that goes wrong there."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from discovery_rig import running
from fleet import eventually

from extproc.discovery.cluster import Access, Cluster, check
from extproc.discovery.errors import DiscoveryError
from extproc.discovery.kubernetes import PodWatcher, WatchPace
from extproc.discovery.pod_table import PodTable
from extproc.discovery.pod_workers import PodRules
from extproc.discovery.selectors import Selector, query
from extproc.discovery.state import DiscoveryState
from extproc.discovery.wanted import Key, Wanted
from extproc.workers.worker import Role
from tests.kube_api import KubeApi, pod

PREFILL, DECODE = {"app": "x", "role": "prefill"}, {"app": "x", "role": "decode"}
RULES = PodRules({Role.PREFILL: Selector.of(PREFILL), Role.DECODE: Selector.of(DECODE)}, port=8000)
PACE = WatchPace(renewal=30, grace=10, first=0.01, longest=0.05, settled=0)


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")


class Following:
    """A watcher, and what it found."""

    def __init__(self, access: Access, namespace: str = "inference", pace: WatchPace = PACE) -> None:
        self.state = DiscoveryState("kubernetes")
        self.found: dict[Key, Wanted] = {}
        self.seen: list[set[str]] = []  # after each change
        self.changed = asyncio.Event()
        selector = query(list(RULES.selectors.values()))
        self.watcher = PodWatcher(
            lambda: Cluster(access, namespace, selector), PodTable(RULES), self.state, self._took, pace
        )

    def _took(self, wanted: Mapping[Key, Wanted]) -> None:
        self.found = dict(wanted)
        self.seen.append(self.names)
        self.changed.set()

    @property
    def names(self) -> set[str]:
        return {wanted.name.partition("/")[2] for wanted in self.found.values()}

    async def until(self, *names: str) -> None:
        """Wait until just these pods are found."""
        async with asyncio.timeout(20):
            while self.names != set(names) or not self.seen:
                self.changed.clear()
                await self.changed.wait()


@asynccontextmanager
async def following(access: Access, **more: Any) -> AsyncIterator[Following]:
    made = Following(access, **more)
    async with running(made.watcher.run()):
        yield made


@pytest.fixture
async def api() -> AsyncIterator[KubeApi]:
    async with KubeApi() as server:
        yield server


@pytest.fixture
def access(api: KubeApi, tmp_path: Path) -> Access:
    return Access(write(tmp_path / "kubeconfig", api.kubeconfig()))


def write(path: Path, document: object) -> str:
    path.write_text(yaml.safe_dump(document))
    return str(path)


FIRST, SECOND = "first", "second"  # tokens
A, B, C = pod("a", PREFILL, "10.0.0.1"), pod("b", DECODE, "10.0.0.2"), pod("c", DECODE, "10.0.0.3")


# --- what is asked, and what comes of it ---


async def test_pods_are_listed_and_then_watched_from_there(api: KubeApi, access: Access) -> None:
    api.put(A, B, pod("other", {"app": "y"}, "10.0.0.9"), pod("elsewhere", PREFILL, "10.0.0.8", namespace="other"))
    async with following(access) as it:
        await it.until("a", "b")
        await api.until(lambda: api.watching)
        listed, watched = api.requests
        assert api.paths == ["/api/v1/namespaces/inference/pods"] * 2
        assert listed["labelSelector"] == watched["labelSelector"] == "app=x,role in (decode,prefill)"
        assert watched["resourceVersion"] == str(api.version)
        assert (watched["allowWatchBookmarks"], watched["timeoutSeconds"]) == ("True", "30")
        assert it.state.up
        assert it.state.synced > 0
        api.put(C)
        await it.until("a", "b", "c")
        api.put(A | {"metadata": A["metadata"] | {"deletionTimestamp": "2026-01-01T01:00:00Z"}})
        await it.until("b", "c")
        assert it.state.found == {("prefill", "terminating"): 1, ("decode", "ready"): 2}
        api.delete(A)
        await eventually(lambda: it.state.found == {("decode", "ready"): 2})
        assert it.state.events == {"list": 1, "added": 1, "modified": 1, "deleted": 1}
        assert it.state.failures == {}


async def test_all_namespaces(api: KubeApi, access: Access) -> None:
    api.put(A, pod("elsewhere", PREFILL, "10.0.0.8", namespace="other"))
    async with following(access, namespace="") as it:
        await it.until("a", "elsewhere")
        assert api.paths[0] == "/api/v1/pods"


async def test_a_list_of_many_pages(api: KubeApi, access: Access) -> None:
    api.page_limit = 2
    api.put(*(pod(f"p{index}", PREFILL, f"10.0.0.{index}") for index in range(7)))
    async with following(access) as it:
        await it.until(*(f"p{index}" for index in range(7)))
        assert it.seen == [it.names], "nothing is told before all is known"
        assert [request.get("continue") for request in api.requests[:4]] == [None, "2", "4", "6"]


async def test_a_page_that_is_gone_begins_the_list_again(api: KubeApi, access: Access) -> None:
    api.put(A, B)
    api.list_faults = [410]
    async with following(access) as it:
        await it.until("a", "b")
        assert it.state.events["gone"] == 1


async def test_the_same_name_and_address_with_another_uid(api: KubeApi, access: Access) -> None:
    api.put(A)
    async with following(access) as it:
        await it.until("a")
        await api.until(lambda: api.watching)
        api.delete(A)
        api.put(pod("a", PREFILL, "10.0.0.1", uid="new"))
        await eventually(lambda: [wanted.owner for wanted in it.found.values()] == ["new"])


async def test_events_that_come_twice_or_late(api: KubeApi, access: Access) -> None:
    api.put(A)
    stale = json.loads(json.dumps(api.pods["inference/a"]))
    async with following(access) as it:
        await it.until("a")
        await api.until(lambda: api.watching)
        api.put(A | {"metadata": A["metadata"] | {"deletionTimestamp": "2026-01-01T01:00:00Z"}})
        await it.until()
        api.send("MODIFIED", stale)
        api.send("ADDED", stale)
        api.put(B)
        api.send("ADDED", api.pods["inference/b"])
        await it.until("b")
        assert {"a"} not in it.seen[2:]


async def test_a_thousand_pods(api: KubeApi, access: Access) -> None:
    def fleet(generation: int) -> list[dict[str, Any]]:
        return [
            pod(
                f"p{index}",
                DECODE if index % 4 else PREFILL,
                f"10.1.{index // 250}.{index % 250}",
                uid=f"{generation}-{index}",
            )
            for index in range(1000)
        ]

    api.put(*fleet(1))
    async with following(access) as it:
        await it.until(*(f"p{index}" for index in range(1000)))
        assert len(api.requests) >= 4, "in pages"
        await api.until(lambda: api.watching)
        for each in fleet(2):
            api.delete(each)
            api.put(each)
        await eventually(lambda: len(it.found) == 1000 and {w.owner[0] for w in it.found.values()} == {"2"})
        assert it.state.events["deleted"] == it.state.events["added"] == 1000
        assert it.state.failures == {}


# --- gaps ---


async def test_a_watch_that_ends_is_resumed_where_it_was(api: KubeApi, access: Access) -> None:
    api.put(A)
    async with following(access) as it:
        await it.until("a")
        for abort in (False, True):
            await api.until(lambda: api.watching)
            api.end_watches(abort=abort)
            await api.until(lambda: not api.watching)
            api.put(B)
            api.delete(B)
            api.put(C)
            await it.until("a", "c")
            api.delete(C)
            await it.until("a")
        assert it.state.events["list"] == 1, "nothing was listed again"
        assert sum(it.state.failures.values()) <= 2


async def test_a_restarted_server(api: KubeApi, access: Access) -> None:
    """What went meanwhile is gone, what came is there."""
    api.put(A, B)
    async with following(access) as it:
        await it.until("a", "b")
        await api.until(lambda: api.watching)
        await api.stop()
        await eventually(lambda: it.state.failures["connection"] >= 1)
        assert it.names == {"a", "b"}, "what is known holds"
        assert it.state.doubt == "kubernetes discovery: the Kubernetes API does not answer"
        api.delete(A)
        api.put(C)
        await api.start()
        await it.until("b", "c")
        await eventually(lambda: it.state.up)
        assert it.state.events["list"] == 1


@pytest.mark.parametrize("how", ["status", "event"])
async def test_a_gap_that_is_too_long(api: KubeApi, access: Access, how: str) -> None:
    api.put(A, B)
    async with following(access) as it:
        await it.until("a", "b")
        await api.until(lambda: api.watching)
        api._log.clear()  # nobody will hear of what comes now
        watches, api._watches = api._watches, set()
        api.delete(A)
        api.put(C)
        api.forget()
        api._watches |= watches
        if how == "status":
            api.end_watches()
        else:
            api.send("ERROR", {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"})
        await it.until("b", "c")
        assert (it.state.events["gone"], it.state.events["list"]) == (1, 2)


async def test_bookmarks_keep_a_gap_short(api: KubeApi, access: Access) -> None:
    api.put(A)
    async with following(access) as it:
        await it.until("a")
        await api.until(lambda: api.watching)
        for _ in range(5):  # of others' pods
            api.put(pod("other", {"app": "y"}, "10.0.0.9"))
        api.bookmark()
        api.forget()
        await eventually(lambda: it.state.events["bookmark"])
        api.end_watches()
        await api.until(lambda: len(api.requests) == 3 and api.watching)
        assert api.requests[-1]["resourceVersion"] == str(api.version)
        api.put(B)
        await it.until("a", "b")
        assert it.state.events["list"] == 1


async def test_a_line_that_is_cut_short(api: KubeApi, access: Access) -> None:
    api.put(A)
    async with following(access) as it:
        await it.until("a")
        await api.until(lambda: api.watching)
        api.raw(b'{"type": "DELETED", "object": {"metadata": {"name": "a", "namesp')
        await asyncio.sleep(0)
        api.end_watches(abort=True)
        await api.until(lambda: not api.watching)
        api.put(B)
        await it.until("a", "b")
        assert {"b"} not in it.seen


async def test_lines_in_pieces(api: KubeApi, access: Access) -> None:
    async with following(access) as it:
        await api.until(lambda: api.watching)
        watches, api._watches = api._watches, set()
        api.put(A, B)
        api._watches |= watches
        lines = b"".join(json.dumps({"type": "ADDED", "object": each}).encode() + b"\n\n" for each in api.pods.values())
        for begin in range(0, len(lines), 200):
            api.raw(lines[begin : begin + 200])
        await it.until("a", "b")


async def test_a_watch_on_which_nobody_speaks_any_more(api: KubeApi, access: Access) -> None:
    """Its connection is open and its server is not there: it is given up after its time and a grace."""
    api.put(A)
    async with following(access, pace=WatchPace(renewal=1, grace=0.2, first=0.01, longest=0.05, settled=0)) as it:
        await it.until("a")
        await api.until(lambda: api.watching)
        mute, api._watches = api._watches, set()
        for watch in mute:
            watch.asked["timeoutSeconds"] = "1000"
        async with asyncio.timeout(20):
            await api.until(lambda: len(api.requests) > 2)
        api.put(B)
        await it.until("a", "b")
        assert it.state.events["list"] == 1
        for watch in mute:
            watch.lines.put_nowait(None)


async def test_watches_are_renewed_in_their_time(api: KubeApi, access: Access) -> None:
    async with following(access, pace=WatchPace(renewal=1, first=0.01, longest=0.05, settled=0)) as it:
        await api.until(lambda: len(api.requests) == 4)
        assert it.state.failures == {}
        assert it.state.up


async def test_watches_that_end_as_soon_as_they_begin_are_not_begun_in_a_rush(api: KubeApi, access: Access) -> None:
    async with following(access, pace=WatchPace(renewal=30, first=0.01, longest=0.05, settled=5)) as it:
        for _ in range(5):
            await api.until(lambda: api.watching)
            api.end_watches()
            await api.until(lambda: not api.watching)
        await eventually(lambda: it.state.failures["ended"] >= 4)


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (b"no JSON\n", "invalid"),
        (b'{"type": "NEW", "object": {}}\n', "invalid"),
        (b'{"type": "ADDED", "object": {"metadata": {"labels": 7}}}\n', "invalid"),
        (b'{"type": "ERROR", "object": {"code": 500, "message": "etcd"}}\n', "refused"),
    ],
)
async def test_what_is_not_understood(
    api: KubeApi, access: Access, lines: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    api.put(A)
    async with following(access) as it:
        await it.until("a")
        await api.until(lambda: api.watching)
        api.raw(lines)
        await eventually(lambda: it.state.failures[reason] == 1)
        api.put(B)
        await it.until("a", "b")
        assert "what is known holds" in caplog.text


# --- who is let in ---


@pytest.mark.parametrize(
    ("status", "reason", "doubt"),
    [
        (401, "unauthorized", "the Kubernetes API refuses our credentials"),
        (403, "forbidden", "the service account may not list and watch pods"),
        (429, "refused", "the Kubernetes API does not answer"),
        (500, "refused", "the Kubernetes API does not answer"),
    ],
)
async def test_a_refusal(
    api: KubeApi, access: Access, status: int, reason: str, doubt: str, caplog: pytest.LogCaptureFixture
) -> None:
    api.put(A)
    api.list_faults = [status] * 100
    async with following(access) as it:
        await eventually(lambda: it.state.failures[reason] >= 3)
        assert it.state.doubt == f"kubernetes discovery: {doubt}, and has found nobody yet"
        assert caplog.text.count("the Kubernetes API fails") == 1, "the same is said once"
        api.list_faults.clear()
        await it.until("a")
        assert it.state.doubt == ""


async def test_it_waits_as_long_as_the_api_says(api: KubeApi, access: Access) -> None:
    api.list_faults, api.fault_headers = [429], {"retry-after": "1"}
    loop = asyncio.get_running_loop()
    async with following(access):
        await api.until(lambda: len(api.requests) == 1)
        began = loop.time()
        await api.until(lambda: len(api.requests) == 2)
        assert loop.time() - began > 0.9


async def test_it_does_not_wait_for_ever(api: KubeApi, access: Access, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("extproc.discovery.cluster._LONGEST_RETRY_AFTER", 0.1)
    api.list_faults, api.fault_headers = [429], {"retry-after": "9" * 400}  # no number of seconds that a clock knows
    async with following(access) as it:
        await eventually(lambda: it.state.up)


async def test_why_a_role_is_needed_is_said(api: KubeApi, access: Access, caplog: pytest.LogCaptureFixture) -> None:
    api.list_faults = [403]
    async with following(access) as it:
        await eventually(lambda: it.state.failures["forbidden"])
    assert "it takes list and watch of pods" in str([vars(record).get("reason") for record in caplog.records])


# --- TLS and tokens ---


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CA (``ca.crt``) and a server's key and certificate for 127.0.0.1 (``server.*``); another CA (``other.crt``)."""
    directory = tmp_path_factory.mktemp("tls")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)  # noqa: S607  # on PATH

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for name in ("ca", "other"):
        openssl(
            *("req", "-x509", *key, "-keyout", f"{name}.key", "-out", f"{name}.crt", "-days", "2"),
            *("-subj", f"/CN={name}", "-addext", "keyUsage=critical,keyCertSign,cRLSign"),
        )
    openssl("req", *key, "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=kubernetes")
    (directory / "names").write_text("subjectAltName=IP:127.0.0.1\nauthorityKeyIdentifier=keyid\n")
    signing = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
    openssl("x509", "-req", "-in", "server.csr", "-out", "server.crt", *signing)
    return directory


def server_tls(certificates: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "server.crt", certificates / "server.key")
    return context


@pytest.fixture
async def tls_api(certificates: Path) -> AsyncIterator[KubeApi]:
    server = KubeApi(FIRST)
    await server.start(server_tls(certificates))
    yield server
    await server.stop()


def service_account(directory: Path, ca: Path, token: str = FIRST) -> Path:
    """As a pod has it: files behind a link that is renamed over."""
    directory.mkdir(exist_ok=True)
    (directory / "token").write_text(token)
    (directory / "ca.crt").write_bytes(ca.read_bytes())
    return directory


def in_cluster(api: KubeApi, directory: Path) -> Access:
    environ = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(api.port)}
    return Access.found(environ, directory)


async def test_a_pods_service_account(tls_api: KubeApi, certificates: Path, tmp_path: Path) -> None:
    tls_api.put(A)
    async with following(in_cluster(tls_api, service_account(tmp_path / "sa", certificates / "ca.crt"))) as it:
        await it.until("a")
        assert tls_api.tokens[0] == "first"


async def test_a_token_that_was_renewed_is_read_again(tls_api: KubeApi, certificates: Path, tmp_path: Path) -> None:
    """By its time, and at once where the old one is refused."""
    directory = service_account(tmp_path / "sa", certificates / "ca.crt")
    tls_api.put(A)
    async with following(in_cluster(tls_api, directory)) as it:
        await it.until("a")
        await tls_api.until(lambda: tls_api.watching)
        tls_api.token = SECOND
        (directory / "token").write_text("second")
        tls_api.end_watches()
        tls_api.put(B)
        await it.until("a", "b")
        assert tls_api.tokens[-1] == "second"
        assert it.state.failures["unauthorized"] <= 1
        assert it.state.events["list"] == 1, "the gap was made up for"


async def test_a_token_file_that_is_empty_for_a_moment(tls_api: KubeApi, certificates: Path, tmp_path: Path) -> None:
    directory = service_account(tmp_path / "sa", certificates / "ca.crt")
    tls_api.put(A)
    access = in_cluster(tls_api, directory)
    (directory / "token").write_text("")
    async with following(access) as it:
        await eventually(lambda: it.state.failures["config"])
        assert "credentials" in it.state.doubt
        (directory / "token").write_text("first")
        await it.until("a")


async def test_a_server_whose_certificate_is_of_another_ca(
    tls_api: KubeApi, certificates: Path, tmp_path: Path
) -> None:
    directory = service_account(tmp_path / "sa", certificates / "other.crt")
    tls_api.put(A)
    async with following(in_cluster(tls_api, directory)) as it:
        await eventually(lambda: it.state.failures["tls"])
        assert tls_api.requests == []
        service_account(directory, certificates / "ca.crt")  # a new one, which is read without a restart
        await it.until("a")


async def test_a_kubeconfig_with_a_ca_and_a_token(tls_api: KubeApi, certificates: Path, tmp_path: Path) -> None:
    tls_api.put(A)
    config = write(tmp_path / "kubeconfig", tls_api.kubeconfig(str(certificates / "ca.crt")))
    async with following(Access.found({"KUBECONFIG": config})) as it:
        await it.until("a")
        assert tls_api.tokens[0] == "first"


async def test_a_kubeconfig_with_a_plugin(tls_api: KubeApi, certificates: Path, tmp_path: Path) -> None:
    """Its token is asked for anew when it is refused."""
    credential = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "kind": "ExecCredential",
        "status": {"token": "first"},
    }
    said = tmp_path / "said.json"
    said.write_text(json.dumps(credential))
    document = tls_api.kubeconfig(str(certificates / "ca.crt"))
    command = {"apiVersion": "client.authentication.k8s.io/v1", "command": "cat", "args": [str(said)]}
    document["users"][0]["user"] = {"exec": command | {"interactiveMode": "Never"}}
    tls_api.put(A)
    async with following(Access(write(tmp_path / "kubeconfig", document))) as it:
        await it.until("a")
        await tls_api.until(lambda: tls_api.watching)
        tls_api.token = SECOND
        said.write_text(json.dumps(credential | {"status": {"token": "second"}}))
        tls_api.end_watches()
        tls_api.put(B)
        await it.until("a", "b")


# --- where the API is ---


def test_who_is_asked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    pod_environ = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    (tmp_path / "token").write_text("t")
    assert str(Access.found(pod_environ | {"KUBECONFIG": "/k"}, tmp_path)) == "kubeconfig /k"
    assert str(Access.found(pod_environ, tmp_path)) == "service account"
    with pytest.raises(DiscoveryError, match="no Kubernetes cluster: this is no pod of one, there is no "):
        Access.found({}, tmp_path)
    (tmp_path / ".kube").mkdir()
    (tmp_path / ".kube/config").write_text("")
    assert str(Access.found({}, tmp_path)) == f"kubeconfig {tmp_path}/.kube/config"


def test_a_pod_without_a_service_account(tmp_path: Path) -> None:
    environ = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    with pytest.raises(DiscoveryError, match="automountServiceAccountToken"):
        Access.found(environ, tmp_path)


@pytest.mark.parametrize("content", ["", "a: b", "[", "clusters: []\ncontexts: []\nusers: []\ncurrent-context: x"])
async def test_a_kubeconfig_that_is_none(tmp_path: Path, content: str) -> None:
    config = tmp_path / "kubeconfig"
    config.write_text(content)
    with pytest.raises(DiscoveryError, match="kubeconfig"):
        await check(Access(str(config)))
    with pytest.raises(DiscoveryError, match="kubeconfig"):
        await check(Access(str(tmp_path / "missing")))


async def test_a_certificate_authority_that_is_missing(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t")
    environ = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    with pytest.raises(DiscoveryError, match="service account: Service certification file does not exist"):
        await check(Access.found(environ, tmp_path))
