"""Every boundary that input from elsewhere crosses, by name."""

from tests.fuzz.messages import MESSAGES
from tests.fuzz.target import Make

TARGETS: dict[str, Make] = {**MESSAGES}
