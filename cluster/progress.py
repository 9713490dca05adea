"""What a person reads while a run goes on: one line every ten seconds, and a summary at the end."""

from __future__ import annotations

import sys
import time

from actors.coordinator import RunSummary, RunStatus
