"""Stream one answer with the `openai` package: python examples/stream_openai.py "Why so blue?"

The server's address is taken from ADASPEC_URL, by default http://127.0.0.1:30000.
"""

import os
import sys

from openai import OpenAI

url = os.environ.get("ADASPEC_URL", "http://127.0.0.1:30000")
client = OpenAI(base_url=f"{url}/v1", api_key="unused")

stream = client.chat.completions.create(
    model="default",
    messages=[{"role": "user", "content": sys.argv[1]}],
    temperature=0,
    max_tokens=128,
    stream=True,
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
