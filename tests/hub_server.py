"""A small server on loopback that speaks the part of the Hub's protocol which `huggingface_hub` uses for models.

Repositories, their commits and the large files (basic LFS transfer) are kept in memory, and contents are checked
against their hashes as the Hub does. Faults are injected in front of the real answer.
"""

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import yaml


LARGE = (".safetensors", ".bin", ".png")


class HubServer:
    """`repos[repo_id]` is `{"files": {path: bytes}, "commits": [title, ...]}`, `objects` the large files by hash.

    `faults` is a list of (method, pattern of the path, how often, status or "cut"), used up as requests come.
    """

    def __init__(self):
        self.repos, self.objects, self.faults, self.requests = {}, {}, [], []
        self.lock = threading.Lock()

    def fault(self, method, path):
        with self.lock:
            for index, (wanted, part, count, kind) in enumerate(self.faults):
                if wanted == method and count > 0 and re.search(part, path):
                    self.faults[index] = (wanted, part, count - 1, kind)
                    return kind
        return None

    def count(self, method, part, status=None):
        return sum(m == method and part in path and status in (None, s) for m, path, s in self.requests)


@contextmanager
def serving():
    hub = HubServer()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def check_card(text):
    """What the Hub demands of a card's metadata; a list of complaints."""
    match = re.match(r"\A---\n(.*?)\n---\n", text, re.DOTALL)
    if match is None:
        return ["no metadata"]
    data = yaml.safe_load(match[1])
    errors = [f"{key} must be a string" for key in ("base_model", "license") if not isinstance(data.get(key, ""), str)]
    errors += [f"{key} must be a list" for key in ("tags", "datasets") if not isinstance(data.get(key, []), list)]
    for index in data.get("model-index", []):
        if not isinstance(index.get("name"), str) or not isinstance(index.get("results"), list):
            errors.append("model-index needs a name and results")
        for result in index["results"]:
            if not isinstance(result["task"].get("type"), str):
                errors.append("a task needs a type")
            if not all(isinstance(result["dataset"].get(key), str) for key in ("name", "type")):
                errors.append("a dataset needs a name and a type")
            for metric in result["metrics"]:
                value = metric.get("value")
                if not isinstance(metric.get("type"), str) or type(value) not in (int, float) or value != value:
                    errors.append(f"metric {metric} needs a type and a number")
    return errors


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def log_message(self, *args):
        pass

    def do_GET(self):
        self._answer(self._get)

    def do_HEAD(self):
        self._answer(self._get)

    def do_POST(self):
        self._answer(self._post)

    def do_PUT(self):
        self._answer(self._put)

    def _answer(self, handle):
        kind = self.hub.fault(self.command, self.path)
        if kind == "cut":
            self.rfile.read(min(int(self.headers.get("Content-Length", 0)), 1000))
            self.hub.requests.append((self.command, self.path, "cut"))
            self.close_connection = True
            self.connection.shutdown(2)
            return
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if kind is not None:
            self._send(kind, {"error": "injected"})
        elif not handle():
            self._send(404, {"error": "Not found"}, {"X-Error-Code": "RepoNotFound"})

    def _send(self, status, content, headers=None):
        self.hub.requests.append((self.command, self.path, status))
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        return True

    def _post(self):
        path, hub = self.path.partition("?")[0], self.hub
        if path == "/api/repos/create":
            given = json.loads(self.body)
            repo_id = f"{given.get('organization') or 'tester'}/{given['name']}"
            status = 409 if repo_id in hub.repos else 200
            hub.repos.setdefault(repo_id, {"files": {}, "commits": []})
            return self._send(status, {"url": f"{hub.endpoint}/{repo_id}", "name": repo_id, "id": repo_id})
        if path == "/api/validate-yaml":
            errors = check_card(json.loads(self.body)["content"])
            answer = {"errors": [{"message": error} for error in errors], "warnings": []}
            return self._send(400 if errors else 200, answer)
        if path == "/lfs-verify":
            given = json.loads(self.body)
            right = len(hub.objects.get(given["oid"], b"")) == given["size"]
            return self._send(200 if right else 404, {})
        if match := re.fullmatch(r"/(.+)\.git/info/lfs/objects/batch", path):
            objects = [self._instruction(item) for item in json.loads(self.body)["objects"]]
            return match[1] in hub.repos and self._send(200, {"transfer": "basic", "objects": objects})
        match = re.fullmatch(r"/api/models/(.+)/(preupload|commit)/main", path)
        if not match or match[1] not in hub.repos:
            return False
        if match[2] == "commit":
            return self._commit(match[1])
        files = [
            {
                "path": item["path"],
                "uploadMode": "lfs" if item["path"].endswith(LARGE) else "regular",
                "shouldIgnore": False,
            }
            for item in json.loads(self.body)["files"]
        ]
        return self._send(200, {"files": files})

    def _instruction(self, item):
        known = {"oid": item["oid"], "size": item["size"]}
        if item["oid"] in self.hub.objects:
            return known
        actions = {
            "upload": {"href": f"{self.hub.endpoint}/lfs/{item['oid']}"},
            "verify": {"href": f"{self.hub.endpoint}/lfs-verify"},
        }
        return known | {"actions": actions}

    def _put(self):
        name = self.path.removeprefix("/lfs/")
        if hashlib.sha256(self.body).hexdigest() != name:
            return self._send(400, {"error": "the content is not that of the hash"})
        self.hub.objects[name] = self.body
        return self._send(200, {})

    def _commit(self, repo_id):
        files, title = {}, ""
        for line in map(json.loads, self.body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                title = value["summary"]
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
        repo = self.hub.repos[repo_id]
        repo["files"] |= files
        repo["commits"].append(title)
        sha = self._sha(repo)
        url = f"{self.hub.endpoint}/{repo_id}/commit/{sha}"
        return self._send(200, {"success": True, "commitOid": sha, "commitUrl": url})

    def _sha(self, repo):
        return hashlib.sha1(repr(sorted(repo["files"].items())).encode()).hexdigest()

    def _get(self):
        path, hub = self.path.partition("?")[0], self.hub
        if path == "/api/whoami-v2":
            return self._send(200, {"name": "tester", "type": "user", "orgs": []})
        if match := re.fullmatch(r"/(.+)/resolve/[^/]+/(.+)", path):
            return match[1] in hub.repos and self._file(hub.repos[match[1]], match[2])
        match = re.fullmatch(r"/api/models/([^/]+/[^/]+)(/tree/[^/]+|/revision/[^/]+)?(/.+)?", path)
        if not match or match[1] not in hub.repos:
            return False
        repo = hub.repos[match[1]]
        if match[3]:  # folders of a repository: these have none
            return self._send(404, {}, {"X-Error-Code": "EntryNotFound"})
        if (match[2] or "").startswith("/tree"):
            entries = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in repo["files"].items()
            ]
            return self._send(200, entries)
        siblings = [{"rfilename": name} for name in repo["files"]]
        info = {"id": match[1], "sha": self._sha(repo), "siblings": siblings, "tags": [], "private": False}
        return self._send(200, info)

    def _file(self, repo, name):
        if name not in repo["files"]:
            return self._send(404, {}, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": self._sha(repo)})
        content = repo["files"][name]
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": self._sha(repo)}
        return self._send(200, content, headers)
