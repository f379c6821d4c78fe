"""Text of others inside a prompt: quoted so that it can neither end its block nor use the model's control words.

This makes injected text inert as markup. That the model does not obey what it reads is asked for by the prompts.
"""

from __future__ import annotations

import re

# "<" begins every tag of ours and every control word of the common chat templates (<|im_end|>, </s>, <start_of_turn>);
# "[INST]" and its kin are Llama's and Mistral's. The look-alikes keep the text readable. A closing tag counts also with
# blanks, or what cannot be seen, before its slash: a model reads over them.
_TAG = re.compile(r"<(?=[/|!?A-Za-z_\u2581\uff5c]|[\s\u00ad\u200b-\u200f\u2060-\u2064\ufeff]+[/|])")
_BRACKET = re.compile(r"\[(?=/?[A-Z_]{3,}\])")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\u2028\u2029]")


def quoted(text: str) -> str:
    """`text` with tags and control words defused and control characters turned into blanks; lines stay lines."""
    return _BRACKET.sub("⟦", _TAG.sub("‹", _CONTROL.sub(" ", text)))


def block(name: str, text: str) -> str:
    """`text`, already quoted, between an opening and a closing tag that it cannot contain."""
    return f"<{name}>\n{text}\n</{name}>"
