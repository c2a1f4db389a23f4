"""A stand-in for SGLang's HTTP interface, run as `python fake_server.py PORT [--behaviour]`.

It answers the way the stock server does on the few routes that AdaSpec's own clients use, so that
their tests need no model. Words in the prompt choose what goes wrong.
"""

import json
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

WORDS = ["The", " sky", " is", " blue", "."]
TOKENS = 8  # one chunk of a speculating server carries more than one token
TARGET_PASSES = 4


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    flushes = 0

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/flushes":
            self._reply(json.dumps(Handler.flushes).encode())
        else:
            self._reply(b"", status=200 if self.path == "/health" else 404)

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        if self.path.startswith("/flush_cache"):
            Handler.flushes += 1
            self._reply(b"Cache flushed.\n")
            return
        text = request["messages"][-1]["content"]
        if "refuse" in text:
            self._reply(b'{"message": "refused on purpose"}', status=400)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        for number, event in enumerate(self._events(request)):
            if "disconnect" in text and number == 2:
                return
            if "break" in text and number == 2:
                event = {"error": {"message": "broken on purpose"}}
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            self.wfile.flush()
            time.sleep(0.01 if "slowly" in text else 0.001)
        self.wfile.write(b"data: [DONE]\n\n")

    def _reply(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    @staticmethod
    def _events(request: dict) -> list[dict]:
        chunks: list[dict] = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}]
        chunks += [{"choices": [{"delta": {"content": w}}], "usage": None} for w in WORDS]
        if request.get("return_spec_tokens_details") and "plain" not in str(request["messages"]):
            details = {"spec_verify_ct": TARGET_PASSES}
            chunks.append({"choices": [], "sglext": {"spec_tokens_details": details}})
        if request.get("stream_options", {}).get("include_usage"):
            chunks.append({"choices": [], "usage": {"completion_tokens": TOKENS}})
        return chunks


def main() -> None:
    port, behaviour = int(sys.argv[1]), sys.argv[2:]
    if behaviour == ["--refuse"]:
        raise SystemExit("adaspec.errors.AdaSpecError: the drafter does not fit.")
    if behaviour == ["--crash"]:
        print("loading\nout of luck", flush=True)
        raise SystemExit(3)
    if behaviour == ["--never-ready"]:
        print("loading", flush=True)
        time.sleep(600)
    if behaviour == ["--with-child"]:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(f"child {child.pid}", flush=True)
    print("ready", flush=True)
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
