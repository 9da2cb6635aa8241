"""A Hugging Face hub on this machine, with the requests that ``huggingface_hub`` makes to list and download files."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "1" * 40


class FakeHub:
    """Serves repositories: by id, the contents of their files. Large files count as LFS files, with SHA-256.

    cut_after: the next download of a large file ends after so many bytes. corrupt: downloads have wrong bytes, once.
    """

    def __init__(self, repositories: Mapping[str, Mapping[str, bytes]]) -> None:
        self.repositories, self.requests = repositories, list[str]()
        self.cut_after: int | None = None
        self.corrupt = False
        self.leaked = False  #: whether the other host, which has large files, got the token of a client
        self.url = ""

    @property
    def environment(self) -> dict[str, str]:
        """Variables that make ``huggingface_hub`` use this hub."""
        others = {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        return {"HF_ENDPOINT": self.url, **others}


@lru_cache(maxsize=32)
def _sum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _git_sum(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()  # as Git does


@contextmanager
def fake_hub(repositories: Mapping[str, Mapping[str, bytes]]) -> Iterator[FakeHub]:
    """Run a hub in a thread."""
    hub = FakeHub(repositories)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, *, body: bool) -> None:
            path = self.path.partition("?")[0]
            hub.requests.append(f"{self.command} {path}")
            if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/(revision|tree)/([^/]+))?", path):
                self.api(match[1], match[3])
            elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                self.file(match[1], match[3], body=body)
            elif match := re.fullmatch(r"/storage/([^/]+/[^/]+)/(.+)", path):
                hub.leaked |= "Authorization" in self.headers
                self.file(match[1], match[2], body=body, stored=True)
            else:
                self.reply(404, b"{}")

        def api(self, name: str, kind: str | None) -> None:
            files = hub.repositories.get(name)
            if files is None:
                self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound"})
                return
            found: Any = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": one} for one in files]}
            if kind == "tree":
                found = [self.entry(path, data) for path, data in files.items()]
            self.reply(200, json.dumps(found).encode(), {"Content-Type": "application/json"})

        @staticmethod
        def entry(path: str, data: bytes) -> dict[str, Any]:
            entry = {"type": "file", "path": path, "size": len(data), "oid": _git_sum(data)}
            if len(data) > 10_000:
                entry["lfs"] = {"oid": _sum(data), "size": len(data), "pointerSize": 130}
            return entry

        def file(self, name: str, path: str, *, body: bool, stored: bool = False) -> None:
            """A small file, or the address of a large one at another host; stored: at that host."""
            data = hub.repositories.get(name, {}).get(path)
            if data is None:
                self.reply(404, b"", {"X-Error-Code": "EntryNotFound"})
                return
            large = len(data) > 10_000
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{_sum(data) if large else _git_sum(data)}"'}
            if large and not stored:
                where = f"http://localhost:{server.server_port}/storage/{name}/{path}"
                linked = {"X-Linked-Etag": headers["ETag"], "X-Linked-Size": str(len(data)), "Location": where}
                self.reply(302, b"", {**headers, **linked})
                return
            start, status, whole = 0, 200, data
            if (given := self.headers.get("Range")) and (match := re.fullmatch(r"bytes=(\d+)-(\d*)", given)):
                start, status = int(match[1]), 206
                data = data[start : int(match[2]) + 1 if match[2] else None]
                headers["Content-Range"] = f"bytes {start}-{start + len(data) - 1}/{len(whole)}"
                hub.requests[-1] += f" from {start}"
            if not body:
                self.reply(200, b"", {**headers, "Content-Length": str(len(whole)), "Accept-Ranges": "bytes"})
                return
            if large and hub.corrupt:
                hub.corrupt, data = False, bytes(len(data))
            cut = hub.cut_after if large else None
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(key, value)
            self.end_headers()
            if cut is None:
                self.wfile.write(data)
                return
            hub.cut_after = None
            self.wfile.write(data[:cut])
            self.wfile.flush()
            self.close_connection = True
            self.connection.close()

        def reply(self, status: int, data: bytes, headers: Mapping[str, str] | None = None) -> None:
            self.send_response(status)
            for key, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
