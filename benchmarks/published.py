"""Figures of both papers, to be set beside ours: other models, another judge, more questions than a sample of ours.

Owns facts alone. Accuracy in percent, as a language model judged it; tokens in thousands, construction by conversation,
query by question, or end to end by question with its share of construction. Both papers leave LoCoMo's adversarial
questions out. A number that a paper has in a figure only is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

LYCHEE = "LycheeMemory V2 (arXiv 2608.12990)"
CHAIN = "Chain-of-Memory (arXiv 2601.14287v2)"
# LYCHEE, section 4.4 and figure 5: accuracy on LoCoMo for thresholds of a cut from 0.3 to 0.7, the best at 0.5.
THRESHOLDS = "published for 0.3 to 0.7, on LoCoMo with GPT-4.1-Mini: 88.18 to 89.22 % right, the best at 0.5"
TOKENS = ("construction", "query", "end to end")

# The systems that a method of `python -m benchmarks methods` is built like.
_ALIKE = {
    "Full context": "full",
    "Naive RAG": "dense",
    "LycheeMemory": "lychee",
    "RAG session": "sessions",
    "RAG turn": "dense",
    "Rerank (bge-reranker-base)": "reranked",
    "CoM": "chain",
    "Evidence only": "gold",
    "full": "lychee",
    "eager construction": "eager",
    "fixed window": "fixed",
    "summary records": "summary",
    "no cross-segment context": "no-reference",
    "record vectors only": "records-only",
    "no planner": "no-planner",
    "no fusion, rerank, diversity": "no-selection",
    "gate: product": "chain",
    "gate: relevance alone": "chain-relevance",
    "gate: consistency alone": "chain-consistency",
    "gate: weighted mean": "chain-weighted",
    "beta 0.3": "chain-beta-0.3",
    "beta 0.7": "chain-beta-0.7",
}


# LongMemEval's types of questions, as the papers shorten them.
_TYPES = {
    "SSU": "single-session-user",
    "SSA": "single-session-assistant",
    "SSP": "single-session-preference",
    "MS": "multi-session",
    "KU": "knowledge-update",
    "TR": "temporal-reasoning",
}


@dataclass(frozen=True, slots=True)
class Figure:
    """One system: accuracy by our names of the categories, tokens by those of `TOKENS`, as far as they are published.
    `ours` is the method of ours that is built alike, if there is one."""

    system: str
    accuracy: dict[str, float]
    tokens: dict[str, float]
    ours: str | None


@dataclass(frozen=True, slots=True)
class Published:
    layout: str
    source: str
    model: str
    figures: tuple[Figure, ...]


def tables(layout: str) -> tuple[Published, ...]:
    """The tables about the data set of a layout; none for data of one's own."""
    return tuple(table for table in TABLES if table.layout == layout)


def _table(layout: str, source: str, model: str, text: str) -> Published:
    """From rows of cells as in the paper, under a head of names; "-" where there is no number."""
    head, *rows = ([cell.strip() for cell in line.split("|")] for line in text.strip().splitlines())
    figures = []
    for system, *cells in rows:
        there = {_TYPES.get(name, name): float(cell) for name, cell in zip(head[1:], cells, strict=True) if cell != "-"}
        tokens = {name: there.pop(name) for name in TOKENS if name in there}
        figures.append(Figure(system, there, tokens, _ALIKE.get(system)))
    return Published(layout, source, model, tuple(figures))


TABLES = (
    _table(
        "locomo",
        f"{LYCHEE}, table 1, tokens from section 4.3",
        "GPT-4.1-Mini",
        """
        system       | all   | single | multi | temporal | open  | construction | query
        Full context | 84.80 | 90.84  | 82.62 | 79.13    | 57.29 | -            | -
        Naive RAG    | 54.42 | 61.24  | 58.87 | 33.96    | 50.00 | -            | -
        MemOS        | 80.84 | 85.37  | 79.43 | 75.08    | 64.58 | -            | -
        MemU         | 66.62 | 74.91  | 72.34 | 43.61    | 54.17 | -            | -
        MemoryOS     | 67.60 | 77.05  | 66.31 | 47.66    | 55.21 | -            | -
        Mem0         | 62.92 | 66.23  | 58.16 | 63.86    | 44.79 | 1520.8       | -
        A-Mem        | 68.83 | 73.25  | 59.93 | 72.90    | 42.71 | 1459.9       | 5.56
        Nemori       | 79.40 | 84.90  | 75.10 | 77.60    | 51.00 | -            | -
        LightMem     | 72.79 | 81.57  | 62.77 | 64.17    | 54.17 | -            | -
        TiMem        | 83.77 | 87.99  | 78.37 | 84.74    | 59.38 | 489.5        | 10.71
        LycheeMemory | 89.22 | 93.34  | 87.23 | 86.60    | 67.71 | 204.1        | 4.01
        """,
    ),
    _table(
        "locomo",
        f"{LYCHEE}, table 1",
        "GPT-4o-Mini",
        """
        system       | all   | single | multi | temporal | open
        Full context | 76.43 | 90.01  | 69.86 | 52.96    | 55.21
        Naive RAG    | 49.68 | 57.55  | 54.61 | 24.30    | 51.04
        MemOS        | 75.97 | 81.45  | 69.15 | 72.27    | 60.42
        MemU         | 61.17 | 72.77  | 62.41 | 33.96    | 46.88
        MemoryOS     | 63.64 | 74.55  | 58.87 | 44.24    | 46.88
        Mem0         | 58.64 | 65.52  | 52.84 | 52.02    | 37.50
        A-Mem        | 60.84 | 66.83  | 52.13 | 61.99    | 30.21
        Nemori       | 74.40 | 82.10  | 65.30 | 71.00    | 44.80
        LightMem     | 72.87 | 76.61  | 67.02 | 76.32    | 45.83
        TiMem        | 75.30 | 81.43  | 62.20 | 77.63    | 52.08
        LycheeMemory | 78.90 | 84.90  | 68.09 | 80.06    | 54.17
        """,
    ),
    _table(
        "locomo",
        f"{LYCHEE}, ablations, section 4.4 and appendix D",
        "GPT-4.1-Mini",
        """
        system                       | all   | single | multi | temporal | open  | construction | query
        full                         | 89.22 | 93.34  | 87.23 | 86.60    | 67.71 | 204.1        | 4.01
        eager construction           | 81.88 | 87.16  | 74.47 | 81.31    | 59.38 | 849.9        | -
        fixed window                 | 82.40 | 90.49  | 74.82 | 75.70    | 56.25 | 174.7        | -
        summary records              | 80.78 | 88.35  | 74.47 | 73.83    | 56.25 | 99.7         | -
        no cross-segment context     | 81.56 | 87.87  | 75.18 | 76.95    | 60.42 | 189.6        | -
        record vectors only          | 81.75 | 88.23  | 76.60 | 78.19    | 52.08 | -            | 4.09
        no planner                   | 83.38 | 90.01  | 79.08 | 78.50    | 54.17 | -            | 2.26
        no fusion, rerank, diversity | 66.62 | 71.34  | 60.64 | 66.04    | 44.79 | -            | 3.35
        """,
    ),
    _table(
        "locomo",
        f"{CHAIN}, main results",
        "GPT-4o-mini",
        """
        system                     | all   | end to end
        Full context               | 71.88 | 31.8
        RAG session                | 65.32 | 7.5
        RAG turn                   | 65.39 | 1.4
        Rerank (bge-reranker-base) | 68.31 | 3.5
        LangMem                    | 54.02 | 286.8
        A-Mem                      | 59.09 | 357.0
        Mem0                       | 63.31 | 388.4
        CoM                        | 72.86 | 4.4
        """,
    ),
    _table(
        "locomo",
        f"{CHAIN}, main results",
        "Qwen3-32B",
        """
        system                     | all   | end to end
        Full context               | 69.74 | 36.0
        RAG session                | 63.18 | 7.8
        RAG turn                   | 61.88 | 1.7
        Rerank (bge-reranker-base) | 65.32 | 3.7
        LangMem                    | 55.25 | 336.6
        A-Mem                      | 60.84 | 409.7
        Mem0                       | 63.51 | 456.0
        CoM                        | 70.97 | 4.8
        """,
    ),
    _table(
        "locomo",
        f"{CHAIN}, tables 3 and 4, figure 3",
        "Qwen3-32B",
        """
        system                  | all
        gate: product           | 70.97
        gate: relevance alone   | 65.26
        gate: consistency alone | 66.84
        gate: weighted mean     | 68.17
        beta 0.3                | 67.52
        beta 0.7                | 66.48
        """,
    ),
    _table(
        "longmemeval",
        f"{LYCHEE}, table 2 (LongMemEval-S), tokens from section 4.3",
        "GPT-4.1-Mini",
        """
        system       | all   | SSU | SSA | SSP | MS | KU | TR | construction | query
        Full context | 66.20 | 91.43 | 100.00 | 56.67 | 53.38 | 75.64 | 48.12 | - | -
        Naive RAG    | 67.20 | 85.71 | 82.36 | 83.33 | 63.91 | 75.64 | 45.86 | - | -
        MemOS        | 65.20 | 90.00 | 64.29 | 50.00 | 54.14 | 70.51 | 63.91 | - | -
        MemoryOS     | 74.40 | 94.29 | 89.29 | 100.00 | 67.67 | 80.77 | 54.89 | - | -
        Mem0         | 71.20 | 95.71 | 50.00 | 90.00 | 69.92 | 74.36 | 62.41 | - | -
        A-Mem        | 71.60 | 95.71 | 100.00 | 63.33 | 61.65 | 82.05 | 52.63 | 1264.3 | 15.46
        Nemori       | 74.60 | 90.00 | 92.90 | 86.70 | 55.60 | 79.50 | 72.20 | - | -
        LightMem     | 69.60 | 90.00 | 23.21 | 76.67 | 51.13 | 88.46 | 84.21 | - | -
        TiMem        | 75.80 | 92.86 | 78.57 | 73.33 | 66.92 | 79.49 | 72.93 | 620.9 | 11.36
        LycheeMemory | 92.20 | 100.00 | 98.21 | 90.00 | 87.97 | 97.44 | 87.22 | 304.7 | 8.88
        """,
    ),
    _table(
        "longmemeval",
        f"{LYCHEE}, table 2 (LongMemEval-S)",
        "GPT-4o-Mini",
        """
        system       | all   | SSU | SSA | SSP | MS | KU | TR
        Full context | 45.60 | 44.29 | 80.36 | 53.33 | 35.34 | 55.13 | 34.59
        Naive RAG    | 59.40 | 85.71 | 83.93 | 46.67 | 52.63 | 65.38 | 41.35
        MemOS        | 77.80 | 95.71 | 67.86 | 96.67 | 70.67 | 74.26 | 77.44
        MemoryOS     | 67.80 | 97.14 | 89.29 | 70.00 | 58.65 | 73.08 | 48.87
        Mem0         | 64.40 | 95.71 | 55.36 | 70.00 | 57.89 | 69.23 | 54.14
        A-Mem        | 63.20 | 92.54 | 98.21 | 36.67 | 53.38 | 70.51 | 44.36
        Nemori       | 64.20 | 88.60 | 83.90 | 46.70 | 51.10 | 61.50 | 61.70
        LightMem     | 69.81 | 87.14 | 32.14 | 68.18 | 71.74 | 83.12 | 67.18
        TiMem        | 76.88 | 95.71 | 82.14 | 63.33 | 70.83 | 86.16 | 68.42
        LycheeMemory | 78.80 | 97.14 | 96.43 | 70.00 | 72.93 | 74.36 | 72.18
        """,
    ),
    _table(
        "longmemeval",
        f"{CHAIN}, main results (LongMemEval-S)",
        "GPT-4o-mini",
        """
        system                     | all   | end to end
        Full context               | 55.80 | 112.7
        RAG session                | 59.00 | 26.6
        RAG turn                   | 64.20 | 7.6
        Rerank (bge-reranker-base) | 62.73 | 11.0
        LangMem                    | 40.20 | 124.7
        A-Mem                      | 52.20 | 289.2
        Mem0                       | 49.40 | 149.5
        CoM                        | 74.20 | 8.2
        Evidence only              | 80.20 | 0.30
        """,
    ),
    _table(
        "longmemeval",
        f"{CHAIN}, main results (LongMemEval-S)",
        "Qwen3-32B",
        """
        system                     | all   | end to end
        Full context               | 55.20 | 119.6
        RAG session                | 62.00 | 27.3
        RAG turn                   | 66.00 | 7.9
        Rerank (bge-reranker-base) | 63.20 | 11.0
        LangMem                    | 41.60 | 150.2
        A-Mem                      | 53.20 | 331.8
        Mem0                       | 50.60 | 156.0
        CoM                        | 76.40 | 8.8
        Evidence only              | 81.80 | 0.35
        """,
    ),
    _table(
        "longmemeval",
        f"{CHAIN}, tables 3 and 4, figure 3 (LongMemEval-S)",
        "Qwen3-32B",
        """
        system                  | all
        gate: product           | 76.40
        gate: relevance alone   | 66.15
        gate: consistency alone | 69.35
        gate: weighted mean     | 72.55
        beta 0.3                | 73.95
        beta 0.7                | 70.14
        """,
    ),
)
