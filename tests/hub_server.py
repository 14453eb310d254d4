"""A small server on loopback that speaks the part of the Hub's protocol which `huggingface_hub` uses for models.

Files are uploaded as small ones are, within the commit, and kept in memory.
"""

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from cards import check_card


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def send(self, content, status=200, **headers):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def serving(handler=None):
    """A server whose `repos[repo_id]` is `{"files": {path: bytes}, "commits": [title, ...]}`, or that of `handler`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler or _Hub)
    server.repos, server.endpoint = {}, f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def environment(hub, cache):
    """Variables of a process whose Hub is `hub`."""
    return {
        "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(cache), "HF_TOKEN": "hf_test", "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_OFFLINE": "0",
    }  # fmt: skip


class _Hub(Handler):
    def do_GET(self):
        if self.path == "/api/whoami-v2":
            return self.send({"name": "tester", "type": "user", "orgs": []})
        if file := re.fullmatch(r"/(.+)/resolve/[^/]+/(.+)", self.path.partition("?")[0]):
            repo = self.server.repos.get(file[1], {"files": {}})
            if (content := repo["files"].get(file[2])) is not None:
                return self.send(
                    content, ETag=f'"{hashlib.sha256(content).hexdigest()}"', **_commit(repo)
                )
            return self.send({}, 404, **{"X-Error-Code": "EntryNotFound"}, **_commit(repo))
        found = re.fullmatch(
            r"/api/models/([^/]+/[^/]+)(/tree/[^/]+|/revision/[^/]+)?(/.+)?",
            self.path.split("?")[0],
        )
        repo = self.server.repos.get(found and found[1])
        if repo is None or found[3]:  # folders of a repository: these have none
            return self.send(
                {}, 404, **{"X-Error-Code": "EntryNotFound" if repo else "RepoNotFound"}
            )
        if (found[2] or "").startswith("/tree"):
            entries = [
                {"type": "file", "path": name, "size": len(x), "oid": name}
                for name, x in repo["files"].items()
            ]
            return self.send(entries)
        siblings = [{"rfilename": name} for name in repo["files"]]
        sha = _commit(repo)["X-Repo-Commit"]
        return self.send(
            {"id": found[1], "sha": sha, "siblings": siblings, "tags": [], "private": False}
        )

    do_HEAD = do_GET

    def do_POST(self):
        body, repos = self.rfile.read(int(self.headers["Content-Length"])), self.server.repos
        if self.path == "/api/repos/create":
            repo_id = (
                f"{json.loads(body).get('organization') or 'tester'}/{json.loads(body)['name']}"
            )
            repos.setdefault(repo_id, {"files": {}, "commits": []})
            return self.send(
                {"url": f"{self.server.endpoint}/{repo_id}", "name": repo_id, "id": repo_id}
            )
        if self.path == "/api/validate-yaml":
            errors = [{"message": error} for error in check_card(json.loads(body)["content"])]
            return self.send({"errors": errors, "warnings": []}, 400 if errors else 200)
        repo_id, action = re.fullmatch(
            r"/api/models/(.+)/(preupload|commit)/main", self.path.partition("?")[0]
        ).groups()
        if action == "preupload":
            names = [file["path"] for file in json.loads(body)["files"]]
            return self.send(
                {
                    "files": [
                        {"path": name, "uploadMode": "regular", "shouldIgnore": False}
                        for name in names
                    ]
                }
            )
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "header":
                repos[repo_id]["commits"].append(line["value"]["summary"])
            elif line["key"] == "file":
                repos[repo_id]["files"][line["value"]["path"]] = base64.b64decode(
                    line["value"]["content"]
                )
            elif line["key"] == "deletedFile":
                del repos[repo_id]["files"][line["value"]["path"]]
        sha = _commit(repos[repo_id])["X-Repo-Commit"]
        url = f"{self.server.endpoint}/{repo_id}/commit/{sha}"
        return self.send({"success": True, "commitOid": sha, "commitUrl": url})


def _commit(repo):
    return {"X-Repo-Commit": hashlib.sha1(repr(sorted(repo["files"].items())).encode()).hexdigest()}
