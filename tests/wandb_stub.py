"""A server on localhost that speaks as much of wandb's protocol as a run needs, and keeps the history it is sent.

Lines are kept at the offsets that the client names, as the real server does: a client that begins again at line 0
overwrites, one that goes on behind its own end sends lines twice. Both show in `history`.
"""

import gzip
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PROJECT = {"id": "1", "name": "flashgpt", "entity": {"id": "1", "name": "somebody"}}


class WandbStub:
    """Use with `with`; `url` is what WANDB_BASE_URL must be."""

    def __init__(self) -> None:
        self.lines: dict[str, dict[int, str]] = {}  # run -> line number -> line
        self.summaries: dict[str, str] = {}
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "WandbStub":
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def history(self, run: str) -> list[dict[str, Any]]:
        """What a user would see of the run: its lines in order."""
        with self._lock:
            return [json.loads(line) for _, line in sorted(self.lines.get(run, {}).items())]

    def forget(self, run: str, lines: int) -> None:
        """As if the last `lines` lines had never arrived."""
        with self._lock:
            for number in sorted(self.lines[run])[-lines:]:
                del self.lines[run][number]

    def _handler(stub) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self._body()
                reply: dict[str, Any] = {}
                if self.path == "/graphql":
                    asked = json.loads(body)
                    reply = {"data": stub._answer(asked.get("operationName", ""), asked.get("variables") or {})}
                elif self.path.endswith("/file_stream"):
                    stub._receive(self.path.split("/")[-2], json.loads(body))
                content = json.dumps(reply).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_PUT = do_GET = do_POST

            def _body(self) -> bytes:
                if "chunked" in self.headers.get("Transfer-Encoding", ""):
                    body = b""
                    while size := int(self.rfile.readline(), 16):
                        body += self.rfile.read(size)
                        self.rfile.readline()
                    self.rfile.readline()
                else:
                    body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

            def log_message(self, *arguments: object) -> None:
                pass

        return Handler

    def _receive(self, run: str, sent: dict[str, Any]) -> None:
        with self._lock:
            files = sent.get("files") or {}
            if history := files.get("wandb-history.jsonl"):
                kept = self.lines.setdefault(run, {})
                kept |= {history["offset"] + i: line for i, line in enumerate(history["content"])}
            if summary := files.get("wandb-summary.json"):
                self.summaries[run] = summary["content"][-1]

    def _answer(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            name = variables.get("name")
            lines = self.lines.get(name or "")
            bucket = {"id": name, "name": name, "displayName": name, "config": "{}", "project": PROJECT, "tags": []}
            bucket["historyLineCount"] = len(lines or ())
            if operation == "Viewer":
                viewer = {"id": "1", "entity": "somebody", "username": "somebody", "email": "", "flags": "{}"}
                return {"viewer": viewer | {"teams": {"edges": []}}}
            if operation == "RunResumeStatus" and lines is None:
                return {"model": None}
            if operation == "RunResumeStatus":
                tail = [lines[max(lines)]] if lines else []
                bucket |= {
                    "summaryMetrics": self.summaries.get(name, "{}"),
                    "logLineCount": 0,
                    "eventsLineCount": 0,
                    "historyTail": json.dumps(tail),
                    "eventsTail": "[]",
                    "notes": "",
                    "wandbConfig": '{"t": 1}',
                }
                return {"model": PROJECT | {"bucket": bucket}}
            if operation == "UpsertBucket":
                inserted = lines is None
                self.lines.setdefault(name, {})
                return {"upsertBucket": {"bucket": bucket, "inserted": inserted}}
            if operation == "CreateRunFiles":
                return {"createRunFiles": {"runID": "1", "uploadHeaders": [], "files": []}}
            return {}
