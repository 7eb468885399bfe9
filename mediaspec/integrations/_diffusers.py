"""What mediaspec needs to know about diffusers versions. Imports nothing else of mediaspec.

Supported: >= 0.42, where `from_pretrained` takes `dtype=`; measured with 0.42.1.
"""

from __future__ import annotations

import diffusers
from packaging.version import Version

__all__ = ["OLDEST", "check_version", "diffusers_version"]

OLDEST = Version("0.42")
diffusers_version: str = diffusers.__version__


def check_version(version: str = diffusers_version) -> str | None:
    """None when diffusers is a supported version, else one sentence that says what to install."""
    if Version(Version(version).base_version) >= OLDEST:
        return None
    return f"diffusers {version} is installed, supported are >= {OLDEST}: pip install 'diffusers>={OLDEST}'"
