"""Worker URLs: what they may be, and what is said of those that may not."""

import pytest

from extproc.errors import InvalidUrlError
from extproc.workers.worker import WorkerUrl

SCHEME = "URL must start with a lowercase http://, https://, grpc://, or grpcs:// scheme"


@pytest.mark.parametrize(
    ("text", "name", "host", "port"),
    [
        ("http://prefill:8000", "http://prefill:8000", "prefill", 8000),
        ("http://Prefill.EXAMPLE:8000/", "http://prefill.example:8000", "prefill.example", 8000),
        ("http://10.0.0.1", "http://10.0.0.1:80", "10.0.0.1", 80),
        ("https://worker.example", "https://worker.example:443", "worker.example", 443),
        ("http://[::1]:8000", "http://[::1]:8000", "::1", 8000),
        ("http://[2001:DB8::1]", "http://[2001:db8::1]:80", "2001:db8::1", 80),
        ("grpc://prefill:50051", "grpc://prefill:50051", "prefill", 50051),
        ("grpc://[::1]:50051", "grpc://[::1]:50051", "::1", 50051),
        ("grpcs://worker.example", "grpcs://worker.example:443", "worker.example", 443),
    ],
)
def test_what_a_url_says(text, name, host, port):
    url = WorkerUrl.parse(text)
    assert (str(url), url.host, url.port) == (name, host, port)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "URL cannot be empty"),
        ("prefill:8000", SCHEME),
        ("HTTP://prefill:8000", SCHEME),
        ("Grpc://prefill", SCHEME),
        ("://prefill", SCHEME),
        ("ftp://prefill", "ftp:// workers are not served; expected one of http://, https://, grpc://, grpcs://"),
        ("unix:///run/worker", "unix:// workers are not served; expected one of http://"),
        ("tcp://prefill:5555", "tcp:// workers are not served; expected one of http://"),
        ("http://", "URL must have a valid host"),
        ("http://:8000", "URL must have a valid host"),
        ("http://a b:8000", "URL must have a valid host"),
        ("http://a\0b:8000", "URL must have a valid host"),
        ("http://a,b:8000", "URL must have a valid host"),
        ("http://[::1:8000", "URL must have a valid host"),
        ("http://prefill:port", "URL must have a valid host"),
        ("http://prefill:99999", "URL must have a valid host"),
        ("http://prefill:0", "Port must be between 1 and 65535"),
        ("http://prefill:8000/v1", "without credentials, path, query or fragment"),
        ("http://prefill:8000?x=1", "without credentials, path, query or fragment"),
        ("http://user:secret@prefill", "without credentials, path, query or fragment"),
        ("ipc:///tmp/worker", "ipc:// workers are not served; expected one of http://"),
        ("ipc://worker", "ipc:// workers are not served; expected one of http://, https://, grpc://, grpcs://"),
        ("grpcs://10.0.0.1", "needs a host name"),
        ("grpc://prefill:50051/Generate", "without credentials, path, query or fragment"),
        ("https://10.0.0.1", "needs a host name"),
        ("https://[::1]:443", "needs a host name"),
    ],
)
def test_what_a_url_may_not_be(text, reason):
    with pytest.raises(InvalidUrlError) as refused:
        WorkerUrl.parse(text)
    assert reason in refused.value.reason


@pytest.mark.parametrize(
    ("scheme", "mode", "tls"),
    [("http", "http", False), ("https", "http", True), ("grpc", "grpc", False), ("grpcs", "grpc", True)],
)
def test_the_scheme_says_how_a_worker_is_reached(scheme, mode, tls):
    url = WorkerUrl.parse(f"{scheme}://w:1")
    assert (url.connection_mode, url.is_grpc, url.tls) == (mode, mode == "grpc", tls)
