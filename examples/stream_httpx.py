"""Stream one answer with plain HTTP: python examples/stream_httpx.py "Why so blue?"

Shows the server-sent events themselves, and SGLang's counters of speculation at their end.
The server's address is taken from ADASPEC_URL, by default http://127.0.0.1:30000.
"""

import json
import os
import sys

import httpx

url = os.environ.get("ADASPEC_URL", "http://127.0.0.1:30000")
request = {
    "messages": [{"role": "user", "content": sys.argv[1]}],
    "temperature": 0,
    "max_tokens": 128,
    "stream": True,
    "stream_options": {"include_usage": True},
    "return_spec_tokens_details": True,
}

tokens, target_passes = 0, 0
with httpx.stream("POST", f"{url}/v1/chat/completions", json=request, timeout=600) as response:
    response.raise_for_status()
    for line in response.iter_lines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event = json.loads(line.removeprefix("data: "))
        for choice in event["choices"]:
            print(choice["delta"].get("content") or "", end="", flush=True)
        if usage := event.get("usage"):
            tokens = usage["completion_tokens"]
        if details := event.get("sglext", {}).get("spec_tokens_details"):
            target_passes = details["spec_verify_ct"]

print(f"\n\n{tokens} tokens", end="")
print(f" in {target_passes} passes of the target" if target_passes else "")
