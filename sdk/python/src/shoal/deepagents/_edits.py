"""Edits as the helper of ``BaseSandbox`` makes them, with its answers in the words of the installed version.

Only what the native call can be asked for, and what the helper has a word for. Everything else is left to the helper.
"""

from __future__ import annotations

from typing import Any

from deepagents.backends import sandbox as helpers
from deepagents.backends.protocol import EditResult

from ..errors import SandboxClientError
from ..models import EditedFile

#: The daemon's codes that the helper has words for.
_WORDS = {
    "file_not_found": "file_not_found",
    "permission_denied": "permission_denied",
    "is_directory": "not_a_file",
    "not_a_regular_file": "not_a_file",
    "not_text": "not_a_text_file",
    "no_match": "string_not_found",
    "several_matches": "multiple_occurrences",
}
#: Says the helper's word in a sentence. A version without it has its helper say all of it.
_SENTENCE: Any = getattr(helpers, "_map_edit_error", None)


def is_plain(path: str, old: str, new: str) -> bool:
    """Whether the native call can be asked for it."""
    try:
        (path + old + new).encode()
    except UnicodeEncodeError:
        return False
    # To the helper, a slash at the end is an error of the kernel's.
    return bool(old) and path.startswith("/") and not path.endswith("/") and "\0" not in path


def done(path: str, edited: EditedFile) -> EditResult:
    """The helper's answer to an edit that was made."""
    return EditResult(path=path, occurrences=edited.replaced)


def refused(path: str, old: str, error: SandboxClientError) -> EditResult | None:
    """The helper's answer to one that was not; ``None`` if the helper has to be asked."""
    if error.code is None:
        # Nobody knows whether it was made, and it must not be made twice.
        raise error
    word = _WORDS.get(error.code)
    if word is None or _SENTENCE is None:
        return None
    answer: EditResult = _SENTENCE(word, path, old)
    return answer
