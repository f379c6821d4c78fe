"""The judges, by name, and that none of them judges itself.

rule                             rules on dates and words; no model
local:CARD                       a model of `lychee models list`, held to the form of the verdict while it decodes
http://127.0.0.1:PORT/v1#MODEL   a model behind an OpenAI-compatible server on this machine
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.judge import Judge, ModelJudge
from benchmarks.rule_judge import RuleJudge
from benchmarks.server import Server
from lychee_local import cards, pull
from lychee_local.backends.load import load_llm
from lychee_local.errors import BadInput, ModelMissing

NAMES = "rule, local:CARD, or http://127.0.0.1:PORT/v1#MODEL"


def open_judge(name: str, *, models_home: Path | None = None, timeout: float = 120.0) -> Judge:
    """The judge called `name`. A model is looked for now, but loaded when the first answer comes.

    Raises:
        BadInput: no judge is called so, the card is no LLM's, or the server is not on this machine.
        ModelMissing: the model is not on this machine.
    """
    if name == "rule":
        return RuleJudge()
    if name.startswith("local:"):
        return _local(name, name.removeprefix("local:"), models_home or cards.default_home())
    address, _, model = name.partition("#")
    if "://" not in address:
        raise BadInput(f"no judge is called {name!r}", hint=f"there are: {NAMES}")
    if not model:
        raise BadInput(f"{name} names no model", hint=f"write it behind a #: {address}#MODEL")
    server = Server(address, model, timeout=timeout)
    return ModelJudge(name, lambda: server, model=model)


def require_other_model(
    judge: Judge, answered_by: str | None, digest: str | None = None, *, same: bool = False
) -> None:
    """Refuse that a model judges its own answers, unless the caller allows the `same`.

    `answered_by` is the name of the answer model, None where no model answered, and `digest` the SHA-256 of its
    weights. Where both digests are known they decide. Else two models are taken for one if one's name begins with the
    other's, because a server calls a model by its file, and a card by the beginning of that.

    Raises:
        BadInput: it is the same model.
    """
    if same or judge.model is None or answered_by is None:
        return
    mine, other = _stem(judge.model), _stem(answered_by)
    known = judge.digest is not None and digest is not None
    if judge.digest == digest if known else mine.startswith(other) or other.startswith(mine):
        raise BadInput(
            f"the judge {judge.name} is the model that answered, {answered_by}",
            hint="choose another judge, or allow it with --same-judge",
        )


def _local(name: str, model: str, home: Path) -> Judge:
    card = cards.card(model, home)
    if card.role != "llm":
        raise BadInput(f"{card.name} is a model of the role {card.role} and cannot judge", hint="name an llm")
    path = pull.locate(card, home)
    if path is None:
        raise ModelMissing(f"{card.name} is not on this machine", hint=f"run: lychee models pull {card.name}")
    return ModelJudge(name, lambda: load_llm(card, path), model=card.name, digest=card.files[0].sha256)


def _stem(model: str) -> str:
    """A model's name without the folder or owner before it and the ending of its file."""
    return model.rsplit("/", 1)[-1].casefold().removesuffix(".gguf")
