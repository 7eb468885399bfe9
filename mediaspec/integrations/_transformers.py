"""What mediaspec needs to know about transformers versions. Imports nothing else of mediaspec.

Supported: >= 5.17, < 6. The `generate` API changed within 5.x (`past_key_values` became `cache` in 5.24), models and
tokenizers did not.
"""

from __future__ import annotations

import transformers
from packaging.version import Version

__all__ = ["OLDEST", "check_version", "transformers_version"]

OLDEST, NEXT = Version("5.17"), Version("6")
transformers_version: str = transformers.__version__


def check_version(version: str = transformers_version) -> str | None:
    """None when transformers is a supported version, else one sentence that says what to install."""
    if OLDEST <= Version(Version(version).base_version) < NEXT:
        return None
    return (
        f"transformers {version} is installed, supported are >= {OLDEST} and < {NEXT}: "
        f"pip install 'transformers>={OLDEST},<{NEXT}'"
    )
