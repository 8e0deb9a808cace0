"""What a user sets for our drafts inside SGLang. In: an environment variable; plugins have no option there. Out: settings.

LOOKAHEAD_SETTINGS='{"tries": ["answers.trie"]}', see settings.py. SGLang's processes inherit it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from lookahead.engines.settings import NAME, DraftSettings
from lookahead.errors import UsageError

SETTINGS = "LOOKAHEAD_SETTINGS"


def settings_of(environment: Mapping[str, str] = os.environ) -> DraftSettings:
    """What a user has set in LOOKAHEAD_SETTINGS. Raises UsageError."""
    text = environment.get(SETTINGS, "{}")
    try:
        return DraftSettings.of({NAME: json.loads(text)})
    except ValueError as error:
        raise UsageError(f'{SETTINGS}: not JSON ({error}). Give an object such as {{"tries": ["answers.trie"]}}.') from None
