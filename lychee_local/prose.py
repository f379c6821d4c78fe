"""What of a text is prose: its sentences, in any script, and which of them state something.

Owns what is left out (code, tables, base64), where a sentence ends, and what is no statement: questions, courtesies,
orders to the machine. Knows nothing of turns, speakers and records. Guesses at the language only as far as it must:
whether English grammar may be applied, and whether every noun has a capital.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from typing import Literal

from lychee_local.lexicon import STOP_WORDS, terms

__all__ = [
    "FUNCTION_WORDS",
    "SCRIPT_BORDER",
    "UNSPACED",
    "URL",
    "commands",
    "language",
    "opened",
    "sentences",
    "statement",
    "statements",
    "substantive",
    "without_code",
    "words",
]

_MAX_SENTENCE = 400
# Quotation marks keep sentences together up to here; beyond it a mark was forgotten, or is no mark.
_MAX_QUOTE = 240


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# --- what is no prose -------------------------------------------------------------------------------------------------

UNSPACED = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]")
# Between a script without spaces and Latin letters there is a border of words that is no blank.
SCRIPT_BORDER = re.compile(r"(?<=[\u3040-\u9fff])(?=[A-Za-z0-9])|(?<=[A-Za-z0-9])(?=[\u3040-\u9fff])")
URL = re.compile(r"\b(?:https?://|www\.)[^\s<>\"“”「」（）。，、]+(?<![.,;:!?)\]'’])", re.I)
_CODE = re.compile(r"```(?:[^`]|`(?!``))*(?:```|\Z)|^[ \t]*~~~[^~]*(?:~~~|\Z)", re.M)
_IMAGE_SEARCH = re.compile(r"\[image(?: search: [^\]]{0,300})?\]")
# An unbroken run: base64 has capitals, small letters and digits; anything else must be longer to be no word.
_BLOB = re.compile(
    r"(?:data:[\w/+.-]{1,60};base64,)[A-Za-z0-9+/=]*"
    r"|(?<![^\s\"'`(])(?=[!-~]{0,59}\d)(?=[!-~]{0,59}[A-Z])(?=[!-~]{0,59}[a-z])[A-Za-z0-9+/=_-]{60,}"
    r"|[!-~]{120,}"
)
# A program, a configuration, a trace, a log: lines that begin so, or that hold this share of signs.
_CODE_LINE = re.compile(
    r"\s*(?:(?:def|class)\s\w+.*:$|import [\w.]+$|from [\w.]+ import\b|return\b[^.!?]*[+*/=;)\]]|#include\b|#!/|@\w+$"
    r"|>>> |\$ [a-z]|(?:const|let|var)\s\w+\s*[=:;]|function\s*\w*\(|(?:public|private|static)\s.*[;{(]$"
    r"|(?:SELECT|INSERT|UPDATE|DELETE|CREATE)\s.*(?:;$|\b(?:FROM|INTO|SET|TABLE)\b)"
    r"|[\w.\[\]'\"]+\s*(?:[+*/-]?=|:=|=>)\s*\S"
    r"|Traceback \(most recent call last\)|File \".*\", line \d+|at [\w.$]+\(.*\)$|(?:if|for|while|elif|try|else)\b.*:$"
    r"|</?[A-Za-z][^<>]*>$|[{\[]\s*[\"{\[].*[:,}\]]\s*$|\"[\w ]{1,60}\":\s*\S|\w+(?:\.\w+)*\(.*\)[;:]?$)"
)
_SIGN = re.compile(r"[{}\[\]<>;=|\\_^`]")
_SIGNS, _SIGNS_SHARE = 3, 0.1
_MARKUP = re.compile(r"\*{1,3}|__|^\s*(?:[-*•>]|#{1,6}|\d{1,2}[.)])\s|`|\[[^\]]*\]\([^)]*\)|\[image: [^\]]*\]|\[\d+\]")
_CELLS = re.compile(r"(?<=[^|])\|(?=[^|])|(?<=[^\t])\t+(?=[^\t])")
# The tags of our own prompts, whoever wrote them into a turn: the words between them were said, the tags say nothing.
_OWN_TAG = re.compile(
    r"</?(?:turn|CURRENT_TURNS|REFERENCE_CONTEXT|SESSION_DATE|memories|conversation|chain)\b[^<>\n]{0,120}>"
)


def _prose(text: str) -> Iterator[str]:
    """The lines of a text that people wrote to people."""
    text = _IMAGE_SEARCH.sub("", _CODE.sub("\n", text))
    for line in text.split("\n"):
        line = _BLOB.sub(_shortened, _OWN_TAG.sub(" ", line))
        if line.strip() and not _tabular(line) and not _symbolic(line):
            yield line


def without_code(text: str) -> str:
    """`text` with a word in the place of each fenced piece of code."""
    return _CODE.sub("[code]", text)


def _shortened(run: re.Match[str]) -> str:
    """Nothing of a blob; of a long address what comes before its query."""
    address = URL.match(run[0])
    return "" if address is None else re.split(r"[?#]", address[0])[0][:_MAX_SENTENCE]


def _tabular(line: str) -> bool:
    return re.fullmatch(r"\s*\|.*\|\s*", line) is not None or len(_CELLS.findall(line)) >= 2


def _symbolic(line: str) -> bool:
    if _CODE_LINE.match(line):
        return True
    bare = _MARKUP.sub(" ", URL.sub(" ", line))
    signs = len(_SIGN.findall(bare))
    return signs >= _SIGNS and signs >= _SIGNS_SHARE * len(bare)


# --- where a sentence ends --------------------------------------------------------------------------------------------

_END = re.compile(
    r"(?<=[.!?…؟۔।])[\"'”’»)\]]*\s+"
    r"|(?<=[。！？｡])[”’」』）】》\"]*(?![”’」』）】》\"と、，])\s*"
    r"|(?<=[!?])(?=[\u3040-\u30ff\u3400-\u9fff])"
)
_TITLES = re.compile(
    r"(?:^|[\s(\"“])(?:Mr|Mrs|Ms|Mx|Dr|Prof|St|Mt|Sr|Sra|Srta|Dra|Hr|Frl|Mme|Mlle|Rev|Gen|Sgt|Capt|Lt|vs|ca|bzw|e\.g|i\.e"
    r"|z\.\s?B|d\.\s?h|u\.\s?a|p\.\s?ej)\.\s*$",
    re.I,
)
# These may also end a sentence: what follows decides.
_SHORT = re.compile(
    r"(?:^|[\s(.])(?:etc|usw|inkl|evtl|ggf|approx|est|dept|inc|ltd|corp|co|no|nr|núm|art|fig|vol|str|pp?|[ap]\.?m|jan|feb|mar"
    r"|apr|jun|jul|aug|sept?|oct|nov|dec|okt|dez|(?:[a-z]\.){1,3}[a-z])\.\s*$|(?:\.\.\.|…)\s*$",
    re.I,
)
_INITIAL = re.compile(r"(?:^|[\s(.])[A-HJ-Z]\.\s*$")
_ORDINAL = re.compile(
    r"\b(?:am|der|die|das|den|dem|des|im|zum|zur|vom|beim|bis|ab|seit|vor|nach|unser\w*|mein\w*)\s\d{1,3}\.\s*$|^\s*\d{1,2}\.\s*$",
    re.I,
)
_MONTH = re.compile(r"(?:Januar|Jänner|Februar|März|April|Mai|Juni|Juli|August|September|Oktober|November|Dezember)\b")
_QUOTES = (("「", "」"), ("『", "』"), ("《", "》"), ("“", "”"), ("«", "»"))


def sentences(text: str) -> Iterator[str]:
    """The sentences of a text in any script, without code, tables and unbroken runs of characters."""
    for line in _prose(text):
        start = 0
        for end in _ends(line):
            yield from textwrap.wrap(" ".join(line[start:end].split()), _MAX_SENTENCE, break_on_hyphens=False)
            start = end


def _ends(line: str) -> Iterator[int]:
    """Looks back no further than a few words or one quotation, so that a line costs time linear in its length."""
    start = 0
    for match in _END.finditer(line):
        end = match.end()
        tail, rest = line[max(start, end - 16) : end], line[end : end + 16]
        if not _abbreviated(tail, rest) and not _quoting(line[max(start, end - _MAX_QUOTE - 1) : end]):
            yield end
            start = end
    yield len(line)


def _abbreviated(tail: str, rest: str) -> bool:
    if not rest or not re.search(r"[.…]\s*$", tail):
        return False
    if _TITLES.search(tail) or _ORDINAL.search(tail):
        return True
    if re.search(r"\d{1,2}\.\s*$", tail) and _MONTH.match(rest):
        return True
    if re.search(r"(?:^|\s)[a-zäöü]\.\s*$", tail) and re.match(r"[A-Za-z]\.", rest):
        return True  # z. B., d. h.
    if _SHORT.search(tail):
        return rest[0].islower() or (rest[0].isdigit() and not tail.rstrip().endswith(("..", "…")))
    return _INITIAL.search(tail) is not None and rest.split()[0].lower() not in STOP_WORDS


def _quoting(part: str) -> bool:
    """Whether the end of this part lies inside a quotation."""
    if len(part) > _MAX_QUOTE:
        return False
    return part.count('"') % 2 == 1 or any(part.count(left) > part.count(right) for left, right in _QUOTES)


# --- in which language ------------------------------------------------------------------------------------------------

Language = Literal["english", "german", "other"]

_ENGLISH = STOP_WORDS - words("a am an as d die do has her in is m no on s so t was were")
_GERMAN = words(
    """
    ich du er wir ihr und oder aber nicht kein keine ist sind war waren wird werden wurde hat habe haben hatte ein
    eine einen einem einer eines der die das den dem des mein meine meinen meinem meiner dein deine sein seine unser
    unsere euch uns mir mich dich sich auf aus bei mit nach von zu zum zur im vom am für über unter seit bis vor
    auch noch schon sehr nur dass weil wenn als wie heute gestern morgen immer gern gerne mag kann muss will soll
    dort hier diese dieser dieses jeden
    """
)
_ROMANCE = words(
    """
    el la los las un una unos unas del al y o pero que en con por para como muy más también yo tú él ella nosotros
    mi mis tu su sus de nos es son está están soy estoy era fue ha han tengo tiene hay desde hasta cuando porque
    gusta gustan encanta llamo llama vivo trabajo le les des du et ou mais dans avec pour sur je il elle nous vous
    mon ma mes est sont suis ai une au aux chez depuis quand parce très aussi não ele uma para meu minha il lo gli
    di che sono mia mio
    """
)
# Words that say little in their language, and are no names when a capital begins them.
FUNCTION_WORDS = STOP_WORDS | _GERMAN | _ROMANCE
_MARKED = re.compile(r"[¿¡ñäöüßáéíóúàèùâêîôûëïœçãõ]")


def language(text: str) -> Language:
    """As far as it matters here: whose grammar is English, and who writes every noun with a capital."""
    if UNSPACED.search(text) or re.search(r"[\u0370-\u1fff]", text):
        return "other"
    low = text.lower()
    found = frozenset(re.findall(r"[^\W\d_]+", low))
    english, german, romance = len(found & _ENGLISH), len(found & _GERMAN), len(found & _ROMANCE)
    marked = _MARKED.search(low) is not None
    if max(german, romance) + marked <= english:
        return "english"
    return "german" if german >= romance and german else "other" if romance or marked else "english"


# --- what states something --------------------------------------------------------------------------------------------

_OPENING = re.compile(
    r"^(?:(?:(?:oh|ooh|ah|aw+|wow|whoa|yeah|yep|yup|yes|no|hey|hi|hello|well|so|and|but|also|btw|by the way|actually"
    r"|honestly|haha|lol|ok|okay|thanks|thank you|absolutely|definitely|exactly|sure|totally|cool|nice|great|awesome"
    r"|oh no|of course|anyway|plus|true|right|yay|ugh|hmm+|phew)\b[,!.…]*"
    r"|(?:I see|I mean|I know|you know|guess what|fyi|sorry|man|look|listen)[,!.…:]+)\s+)+",
    re.I,
)
_COURTESY = re.compile(
    r"^(?:hi|hey|hello|bye|goodbye|good (?:morning|night|evening|luck)|thank|thanks|thx|no problem|no worries"
    r"|you're welcome|take care|see you|talk (?:to you )?(?:soon|later)|have (?:a )?(?:fun|good|great|nice)|congrats"
    r"|congratulations|wow|awesome|amazing|cool|nice|great|glad|so (?:glad|happy|proud|cool|kind|sweet)"
    r"|good (?:to|for)|sounds"
    r"|that's|that is|that sounds|what (?:a|an)\b|how (?:cool|nice|awesome)|looks|long time|keep (?:it|up)|let me know"
    r"|i agree|of course|absolutely|definitely|exactly|feel free|wishing you|(?:it )?means a lot"
    r"|you(?:'re| are) (?:gonna|going to) (?:make|do|be|rock|nail)|you(?:'re| are) doing (?:an?|so|great)"
    r"|you really (?:care|are|put|have)"
    r"|danke|vielen dank|hallo|guten (?:morgen|tag|abend)|gute nacht|tschüss?|bis (?:bald|dann|später)|gern geschehen"
    r"|viel (?:spaß|glück|erfolg)|wie schön|(?:das )?klingt|herzlichen glückwunsch"
    r"|[¡¿]?(?:(?:muchas )?gracias|hola|buen(?:os|as) (?:días|tardes|noches)|adiós|de nada"
    r"|qué (?:bien|bueno|genial|alegría)|me alegro|suena|hasta (?:luego|pronto)|felicidades)"
    r"|merci|bonjour|salut|شكر\w*|مرحب\w*|[أا]هل\w*|السلام عليكم|صباح الخير|مساء الخير|مع السلامة|عفو\w*)(?!\w)",
    re.I,
)
# Of oneself, and yet about nothing.
_WARMTH = re.compile(
    r"^(?:i(?:'m| am) (?:always )?(?:here for you|so (?:glad|happy|proud|excited) (?:for|of) you)"
    r"|i (?:really )?appreciate (?:it|that|you)|i can't wait to (?:hear|see) (?:it|more|how)"
    r"|i(?:'m| am) (?:really )?looking forward to (?:it|that|hearing))\b",
    re.I,
)
_VOCATIVE = re.compile(r"^(?:(?:[Oo]h|[Aa]w+|[Hh]ey|[Ww]ow|[Yy]eah),?\s+)?(?!\w+ly\b)[A-Z][a-z]+,\s+")
_COURTESY_UNSPACED = re.compile(
    r"^(?:(?:谢谢|感谢|你好|您好|再见|不客气|不用谢|不用客气|别客气|原来如此|哦|呃|没问题|好的|好呀|好啊|当然|是的|是啊|对啊|嗯|嗨|哈|晚安|早上好|早安|加油|太好了|太棒了|真棒"
    r"|真好|听起来|看起来|看来|很高兴|哇|ありがとう|こんにちは|こんばんは|おはよう|おやすみ|はじめまして|すみません|よろしく|お疲れ|なるほど"
    r"|いいですね|そうですね|そうなん)[^，,。！!、]*[，,。！!、]?)+"
)
_QUESTION_UNSPACED = re.compile(r"(?:か|かな|吗|么|呢)[。．.…～~]*$")
_REQUEST = re.compile(r"^(?:can|could|would|will)\s(?:you|u)\b", re.I)
# A question that states something: what it states is left of it.
_TAG_QUESTION = re.compile(
    r",\s*(?:right|you know|huh|eh|ok(?:ay)?|(?:do|did|are|is|was|were|have|has|wo|would|could|ca)n['’]t\s\w+)\?$",
    re.I,
)
_KNOWN_THAT = re.compile(
    r"^(?:(?:did|do)\s(?:you\s(?:know|hear)|I\s(?:ever\s)?(?:tell|mention(?:\sto)?)(?:\syou)?)|have\sI\s(?:ever\s)?told\syou)"
    r"\s(?:that\s(?=(?:I|my)\b)|(?=I\b))",
    re.I,
)
_TOLD_TERMS = 5
# One word says enough of oneself where it is what one is or has.
_IS_OR_HAS = re.compile(
    r"\bI(?:['’]ve| have|['’]m| am| own)(?: got)? (?:an?|\d+|two|three|four|five) (?!(?:idea|clue|doubt|question"
    r"|problem|bit|lot|few|feeling|point|plan|couple|fan|mess|big|huge|little)\b)[^\W\d_]{3,}",
    re.I,
)
# Orders to the machine. "Remember that I am allergic to nuts" is none: it is what a memory is for.
_ORDER = re.compile(
    r"^\W*(?:please\s|now\s|bitte\s|por favor,?\s|system:\s)*(?:"
    r"(?:ignore|disregard|forget|override|bypass|skip)\b.{0,40}\b(?:above|previous|prior|preceding|earlier|instructions?"
    r"|prompts?|rules|directions|everything|system)\b"
    r"|(?:ignorier\w*|vergiss|vergesst|missachte)\b.{0,40}\b(?:oben|obige\w*|vorherige\w*|bisherige\w*|anweisung\w*|regeln)\b"
    r"|(?:ignora|ignore|olvida)\b.{0,40}\b(?:anterior\w*|instrucciones|arriba|reglas)\b"
    r"|.{0,8}(?:忽略|无视|忘记|忘掉).{0,12}(?:以上|上面|之前|前面|指令|指示|规则)"
    r"|.{0,24}(?:指示|命令|指令|ルール)を?(?:すべて|全て|全部)?(?:無視|忘れ)|(?:تجاهل|انس).{0,40}(?:تعليمات|أعلاه|السابق\w*)"
    r"|you are now\b|act as\b|new instructions?:|system prompt:"
    r"|(?:store|save|record|write|insert|output|return|add)\s(?:the following|this|exactly|only|a (?:record|memory)"
    r"|records?|memor(?:y|ies))\b)",
    re.I,
)


def opened(sentence: str) -> str:
    """The sentence without "oh", "well", "yes, and" and the like at its beginning."""
    return _OPENING.sub("", sentence)


def statement(sentence: str) -> str:
    """What a sentence states: "Did you know I moved?" that I moved; "I moved, you know?" the same; most others all."""
    if (tag := _TAG_QUESTION.search(sentence)) and _asserts(sentence[: tag.start()]):
        sentence = f"{sentence[: tag.start()]}."
    if (asked := _KNOWN_THAT.match(sentence)) and sentence.endswith("?"):
        return f"{sentence[asked.end() :].rstrip('?!')}."
    return sentence


def _asserts(sentence: str) -> bool:
    """Whether what stands before "right?" is said, not asked: of oneself, or at some length."""
    return re.search(r"\b(?:I|[Mm]y)\b", sentence) is not None or len(set(terms(sentence))) >= _TOLD_TERMS


def substantive(sentence: str) -> bool:
    """Whether a sentence says something: no question, no courtesy, no order to the machine, three words with a meaning,
    two if about oneself."""
    sentence = statement(sentence)
    if _REQUEST.match(sentence) or sentence.rstrip("\"'”’»」』) ").endswith(("?", "？", "؟")) or _ORDER.match(sentence):
        return False
    if UNSPACED.search(sentence):
        plain = _COURTESY_UNSPACED.sub("", sentence)
        return len(set(terms(plain))) >= 6 and not _QUESTION_UNSPACED.search(plain)
    found = len(set(terms(sentence)))
    if re.search(r"\b(?:I|[Mm]y|[Ww]e|[Oo]ur)\b", sentence) and not _WARMTH.match(sentence):
        return found >= 2 or (found == 1 and _IS_OR_HAS.search(sentence) is not None)
    return found >= 3 and not _COURTESY.match(sentence) and not _COURTESY.match(_VOCATIVE.sub("", sentence))


def statements(text: str) -> Iterator[str]:
    """The sentences of a text that say something."""
    return filter(substantive, sentences(text))


def commands(sentence: str) -> bool:
    """Whether a sentence is an order to the machine that reads it."""
    return _ORDER.match(sentence) is not None
