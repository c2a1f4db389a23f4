"""A stand-in for SGLang's HTTP interface, run as `python fake_server.py PORT [--behaviour]`.

It answers the way the stock server does on the few routes the load generator and the launcher use,
so that their tests need no model.
"""

import json
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

WORDS = ["The", " sky", " is", " blue", ".", ""]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _reply(self, body: bytes, kind: str = "application/json", status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.path == "/health":
            self._reply(b"")
        elif self.path == "/get_model_info":
            self._reply(json.dumps({"model_path": "fake"}).encode())
        else:
            self._reply(b"{}", status=404)

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = request.get("text") or request["messages"][-1]["content"]
        if "refuse" in text:
            self._reply(b'{"error": {"message": "refused on purpose"}}', status=400)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for number, event in enumerate(self._events(request)):
            if "disconnect" in text and number == 2:
                self.close_connection = True
                return
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            self.wfile.flush()
            time.sleep(0.002)
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _events(self, request: dict) -> list[dict]:
        if self.path == "/generate":
            return self._native_events()
        chunks: list[dict] = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}]
        chunks += [{"choices": [{"delta": {"content": word}}]} for word in WORDS]
        chunks.append({"choices": [], "usage": {"completion_tokens": len(WORDS)}})
        return chunks

    def _native_events(self) -> list[dict]:
        # Cumulative, as SGLang streams: every event repeats the text so far and the counters.
        events = []
        for count in range(1, len(WORDS) + 1):
            meta = {
                "completion_tokens": count,
                "spec_verify_ct": (count + 1) // 2,
                "finish_reason": {"type": "stop"} if count == len(WORDS) else None,
            }
            events.append({"text": "".join(WORDS[:count]), "meta_info": meta})
        return events


def main() -> None:
    port, behaviour = int(sys.argv[1]), sys.argv[2:]
    if behaviour == ["--refuse"]:
        raise SystemExit("adaspec.errors.AdaSpecError: the drafter does not fit.")
    if behaviour == ["--crash"]:
        print("loading\nout of luck", flush=True)
        raise SystemExit(3)
    if behaviour == ["--with-child"]:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(f"child {child.pid}", flush=True)
    print("ready", flush=True)
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
