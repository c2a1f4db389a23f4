"""Every boundary that input from elsewhere crosses, by name."""

from tests.fuzz.files import FILES
from tests.fuzz.messages import MESSAGES
from tests.fuzz.target import Make
from tests.fuzz.texts import TEXTS

TARGETS: dict[str, Make] = {**MESSAGES, **FILES, **TEXTS}
