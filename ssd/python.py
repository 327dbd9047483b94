"""Another process of Python that imports what this one would."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any


def start(module: str, *words: str, defaults: dict[str, str], **options: Any) -> subprocess.Popen[Any]:
    """Start `python -m module words` in a session of its own: Ctrl-C is the caller's to handle.

    defaults: environment variables for where the user has not set them; options: more for subprocess.Popen.
    """
    # -P and the caller's own path: it imports what the caller would, not what lies in the working directory.
    path = os.pathsep.join(os.path.abspath(place) for place in sys.path)
    env = {**defaults, **os.environ, "PYTHONPATH": path}
    return subprocess.Popen([sys.executable, "-P", "-m", module, *words], start_new_session=True, env=env, **options)
