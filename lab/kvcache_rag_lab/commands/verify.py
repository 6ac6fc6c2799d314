"""`kvcache-rag verify MODEL`: how far each policy is from full prefill, on your own questions.

It prints a table and one sentence, and writes a verdict file for `Engine(..., gate=FILE)`.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcache_rag.commands.options import (
    add_max_new_tokens,
    add_model,
    add_options,
    new_file,
    number,
    policy_name,
    ready,
    whole,
)
from kvcache_rag.progress import plural, table, tell

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from kvcache_rag.engine import Engine
    from kvcache_rag.policies import ReusePolicy
    from kvcache_rag.verdict import AuxiliaryAgreement, PolicyScore, Verdict
    from kvcache_rag_lab.evaluation.verification import Scoring, Verification
    from kvcache_rag_lab.scoring.question import Question, Task

HELP = "check on your own questions which policy keeps full prefill's answers, for Engine(gate=...)"

POLICIES = (
    *("bestfew", "reuse", "bestlast", "composite"),
    *("legolink", "cacheblend", "prophetkv", "ape"),
)

READER = "reader"

KEY = "KVCACHE_RAG_API_KEY"

# What every engine behind a server does.
OF_SERVERS = ("bestfew", "reuse", "composite")

# Where a model cannot do all of these, as one with recurrent layers.
OF_OTHERS = ("bestfew", "reuse", "bestlast", "combination")

# What llama.cpp does, which shows neither attention nor keys of single layers.
OF_LLAMA = ("bestfew", "reuse", "bestlast", "legolink", "combination")

# Of a model in this process.
_OF_MODELS = (
    *("adapter", "auxiliary", "backend", "device", "dtype"),
    *("kv_codec", "system_prompt", "weight_format"),
)

# Questions of a task; a file is asked as a whole.
QUESTIONS = 200

_COUNTLESS = 100_000  # more than anybody asks

FAILED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare model, questions, policies and where the verdict goes."""
    from kvcache_rag.settings import LocalSettings

    add_model(parser, nargs="?")
    parser.add_argument(
        "--base-url",
        metavar="URL",
        help="ask a running `kvcache-rag serve` instead, whatever engine is behind it; its "
        "verdict is for that server's --gate",
    )
    parser.add_argument(
        "--api-key", metavar="KEY", help=f"for that server; else the environment's {KEY}"
    )
    add_options(parser, LocalSettings, *_OF_MODELS)
    parser.add_argument(
        "--data",
        metavar="PATH",
        type=Path,
        help='questions, one JSON object a line: {"question": "...", "documents": ["..."], '
        '"answers": ["..."]}; answers may be left out, and a document may be {"text": "...", '
        '"relevant": true}. With --task the folder of its data set',
    )
    parser.add_argument(
        "--task", help=f"a task of `eval` instead; {READER} for the packaged reader's own questions"
    )
    parser.add_argument(
        "--questions",
        metavar="N",
        type=whole(),
        help=f"at most so many (default: all, {QUESTIONS} of a task)",
    )
    parser.add_argument(
        "--seed",
        metavar="N",
        type=whole(0),
        default=0,
        help="which of them, and of intervals (default: 0)",
    )
    parser.add_argument(
        "--policies",
        nargs="+",
        metavar="POLICY",
        type=policy_name,
        help=f"compared with full prefill, such as cacheblend:0.3 (default: {' '.join(POLICIES)}; "
        f"of a server {' '.join(OF_SERVERS)}; with recurrent layers {' '.join(OF_OTHERS)}; "
        f"of llama.cpp {' '.join(OF_LLAMA)})",
    )
    parser.add_argument(
        "--keep",
        type=number(0, 1, above=True),
        default=0.95,
        metavar="SHARE",
        help="share of full prefill's score that a policy must keep for sure (default: 0.95)",
    )
    add_max_new_tokens(parser, 32)
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=new_file,
        default="verdict.json",
        help="default: verdict.json",
    )


def run(arguments: argparse.Namespace) -> int:
    """Ask, print, write; returns 1 if the model's caches do not even stitch."""
    _check(arguments)
    policies = _policies(arguments)
    _ready(arguments)
    planned = _planned(arguments)  # before the model is loaded, which takes longer
    with _opened(arguments) as (engine, auxiliary):
        agreement, scorer = None, ""
        if not arguments.policies and not arguments.base_url:
            policies = _possible(engine, policies)
        if auxiliary is not None:
            agreement = _agreement(engine, auxiliary, planned)
            scorer = agreement.name
        verdict = planned.verdict(
            engine, policies, auxiliary=agreement, scorer=scorer, show_progress=True
        )
    verdict.save(arguments.out)
    is_server = arguments.base_url is not None
    print("\n".join(lines(verdict, str(arguments.out), server=is_server)))
    return 0 if all(check.passed for check in verdict.checks) else FAILED


def _check(arguments: argparse.Namespace) -> None:
    """Everything that can be said before a question is read."""
    from kvcache_rag.errors import InvalidInputError

    if arguments.base_url is None and arguments.model is None:
        raise InvalidInputError("give a MODEL to verify, or --base-url URL of a server")
    if arguments.base_url is not None:
        others = [name for name in _OF_MODELS if getattr(arguments, name)]
        if others:
            raise InvalidInputError(
                f"--{others[0].replace('_', '-')} is the server's to say; leave it out"
            )
    if arguments.data is None and arguments.task is None:
        raise InvalidInputError(
            "give --data FILE with questions of your own, or --task reader for a first try"
        )
    asked = None if arguments.task else arguments.data
    if asked is not None and asked.resolve() == arguments.out.resolve():
        raise InvalidInputError(f"--out would replace the questions {asked}; name another file")


def _ready(arguments: argparse.Namespace) -> None:
    """Refuse what can be refused before anything is loaded, then say that it begins."""
    from kvcache_rag.settings import LocalSettings
    from kvcache_rag_lab.evaluation.datasets import read_own_questions

    if arguments.task is not None:
        _tasks(arguments)
    else:
        read_own_questions(arguments.data)
    if arguments.base_url is None:
        ready(LocalSettings.from_source(arguments))
    else:
        tell(f"asking {arguments.base_url}")


def kept(arguments: argparse.Namespace) -> str:
    """What Ctrl-C leaves."""
    return f"nothing of it is kept, {arguments.out} was not written"


def _planned(arguments: argparse.Namespace) -> Verification:
    from kvcache_rag_lab.evaluation.verification import AGREEMENT, Verification

    score: Scoring | None = None
    if arguments.task is None:
        from kvcache_rag_lab.evaluation.datasets import read_own_questions
        from kvcache_rag_lab.evaluation.tasks import own_score

        questions = _drawn(read_own_questions(arguments.data), arguments)
        answered = all(question.answers or question.answer_groups for question in questions)
        score, measure = (own_score, "f1") if answered else (None, AGREEMENT)
        source = arguments.data.name
    else:
        questions, score, measure = _task(arguments)
        source = arguments.task
    return Verification(
        questions=questions,
        score=score,
        measure=measure,
        source=source,
        max_new_tokens=arguments.max_new_tokens,
        threshold=arguments.keep,
        seed=arguments.seed,
    )


def _drawn(questions: list[Question], arguments: argparse.Namespace) -> list[Question]:
    import random

    if arguments.questions is None or arguments.questions >= len(questions):
        return questions
    chosen = random.Random(arguments.seed).sample(range(len(questions)), arguments.questions)
    return [questions[index] for index in sorted(chosen)]


def _tasks(arguments: argparse.Namespace) -> dict[str, Task]:
    """The task that was named, or of the reader each of its kinds."""
    from kvcache_rag_lab.evaluation.tasks import task_by_name
    from kvcache_rag_lab.reader import KINDS

    names = [arguments.task]
    if arguments.task == READER:
        names = [f"{READER}_{kind}" for kind in KINDS]
    return {name: task_by_name(name, data=arguments.data) for name in names}


def _task(arguments: argparse.Namespace) -> tuple[list[Question], Scoring, str]:
    from dataclasses import replace

    tasks = _tasks(arguments)
    wanted = arguments.questions or QUESTIONS
    each = -(-wanted // len(tasks))
    by_task = [
        [
            replace(question, id=f"{name}/{question.id}")
            for question in task.questions(each, arguments.seed)
        ]
        for name, task in tasks.items()
    ]
    # The kinds in turn, so that few questions are of many kinds.
    mixed = itertools.chain(*itertools.zip_longest(*by_task))
    questions = [question for question in mixed if question is not None][:wanted]

    def score(answer: str, question: Question) -> dict[str, float]:
        return tasks[question.id.partition("/")[0]].score(answer, question)

    return questions, score, next(iter(tasks.values())).metric


def _policies(arguments: argparse.Namespace) -> list[ReusePolicy]:
    from kvcache_rag.errors import InvalidInputError
    from kvcache_rag.policies.policy_registry import policy_by_name

    default: tuple[str, ...] = OF_SERVERS if arguments.base_url else POLICIES
    if arguments.backend == "llama.cpp":
        default = OF_LLAMA
    names = list(dict.fromkeys(arguments.policies or default))
    if arguments.auxiliary and not any(name.startswith("cacheclip") for name in names):
        names.append("cacheclip")
    policies = [policy_by_name(name) for name in names]
    if all(policy.is_full for policy in policies):
        raise InvalidInputError("there is nothing to verify; add a policy that reuses chunks")
    for name, policy in zip(names, policies, strict=True):
        if "relevance" in policy.reads and not arguments.auxiliary:
            raise InvalidInputError(f"{name} needs a model that scores chunks; name --auxiliary")
    return policies


def _possible(engine: Engine, policies: list[ReusePolicy]) -> list[ReusePolicy]:
    """What is compared by itself on a model that may not be able to do all of it."""
    from kvcache_rag.policies.checks import why_not
    from kvcache_rag.policies.policy_registry import name_of, policy_by_name

    abilities = engine._adapter.abilities
    if not any(why_not(policy, abilities) for policy in policies):
        return policies
    # What the engine does by itself, then the others.
    names = dict.fromkeys([name_of(engine.policy), *OF_OTHERS])
    others = [policy_by_name(name) for name in names]
    return [policy for policy in others if not why_not(policy, abilities)]


@contextlib.contextmanager
def _opened(arguments: argparse.Namespace) -> Iterator[tuple[Engine, Any]]:
    """An engine whose chunks are kept in memory, or in files of a codec, and its auxiliary."""
    if arguments.base_url is not None:
        from kvcache_rag.integration import remote_engine

        key = arguments.api_key or os.environ.get(KEY)
        yield remote_engine(arguments.base_url, api_key=key, model=arguments.model or ""), None
        return
    import tempfile

    from kvcache_rag.engine import like
    from kvcache_rag.settings import LocalSettings

    settings, auxiliary = LocalSettings.from_source(arguments), None
    if settings.auxiliary:
        from kvcache_rag.auxiliary import Auxiliary

        auxiliary = Auxiliary.from_pretrained(settings.auxiliary)
    engine = settings.open_engine(auxiliary=auxiliary)
    if settings.kv_codec in (None, "native"):
        yield engine, auxiliary
        return
    with tempfile.TemporaryDirectory() as folder:

        def over_files() -> Engine:
            store = settings.model_copy(update={"kv_dir": folder}).open_store(durable=False)
            return like(engine, store=store, combinations=None)

        over_files().add(["."])  # writes the prefix, which whoever computes it remembers exactly
        yield over_files(), auxiliary


def _agreement(engine: Engine, auxiliary: Any, planned: Verification) -> AuxiliaryAgreement:
    from kvcache_rag_lab.evaluation.auxiliary import auxiliary_agreement

    return auxiliary_agreement(
        engine, auxiliary, planned.questions, seed=planned.seed, show_progress=True
    )


# ---------------------------------------------------------------------- what was found
def lines(verdict: Verdict, file: str, *, server: bool = False) -> Iterator[str]:
    """The table, the notes, and one sentence."""
    identity = verdict.identity
    yield (
        f"model {identity.model}, {identity.dtype}, chunks stored as {identity.codec}; "
        f"{plural(verdict.questions, 'question')} of {verdict.source}, measured by "
        f"{verdict.measure}"
    )
    yield ""
    for check in verdict.checks:
        state = "equal" if check.passed else "DIFFERENT"
        yield f"{state:<10}{check.name} ({check.error:.2g}, rounding explains {check.tolerance:g})"
    yield ""
    scored = (verdict.full, *verdict.policies)
    columns = [_cells(row) for row in scored]
    known = [head for head in columns[0] if any(row[head] != "-" for row in columns)]
    heads = [verdict.measure if head == _SCORE else head for head in known]
    rows = [[row[head] for head in known] for row in columns]
    yield from table([heads, *rows], right=frozenset(range(len(heads) - 1)))
    if verdict.auxiliary is not None:
        yield ""
        yield _auxiliary_line(verdict.auxiliary)
    yield ""
    yield from verdict.notes
    yield _sentence(verdict)
    if verdict.is_blurred and _stitches(verdict):
        yield from _nearness(verdict.policies)
    use = f"`kvcache-rag serve --gate {file}`" if server else f'Engine(..., gate="{file}")'
    yield f"Wrote {file}; use it with {use}."


_SCORE = "score"


def _cells(row: PolicyScore) -> dict[str, str]:
    low = row.kept_low if row.kept_low > 0 else 0.0  # nothing is proved; a NaN, too
    kept, *ends = map(_percent, (row.kept, low, row.kept_high))
    interval = kept if math.isnan(row.kept) else f"{kept} ({'-'.join(ends)})"
    name = row.policy + (f" by {row.auxiliary}" if row.auxiliary else "")
    return {
        _SCORE: _percent(row.score),
        "kept of full": interval,
        "same answer": _percent(row.same_answer),
        "right": _percent(row.right),
        "wrong document": _percent(row.wrong_document),
        "KL first": _number(row.first_divergence),
        "KL answer": _number(row.answer_divergence),
        "top-1": _percent(row.top1),
        "recomputed": _percent(row.recomputed),
        "ttft": f"{1000 * row.ttft:.1f} ms",
        "of full": f"{row.ttft_ratio:.2f}x",
        "policy": name,  # last, as it may be long
    }


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{100 * share:.1f}"


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2g}"


def _auxiliary_line(found: AuxiliaryAgreement) -> str:
    return (
        f"Attention of {found.name} to the chunks against the model's own: KL "
        f"{found.divergence:.2f} ({found.divergence_low:.2f}-{found.divergence_high:.2f}) nats; "
        f"of the top 20 % of tokens, Jaccard {found.jaccard:.2f} "
        f"({found.jaccard_low:.2f}-{found.jaccard_high:.2f}), {found.random_jaccard:.2f} by chance."
        f"{_first_layer(found)}"
    )


def _first_layer(found: AuxiliaryAgreement) -> str:
    """What choosing by early layers would go by; nothing in a verdict of before it was measured."""
    kl, low, high = (
        found.first_layer_divergence,
        found.first_layer_divergence_low,
        found.first_layer_divergence_high,
    )
    if math.isnan(kl):
        return ""
    side = "nearer" if found.divergence < kl else "no nearer"
    return (
        f" The model's own first layer against its last: KL {kl:.2f} ({low:.2f}-{high:.2f}) nats, "
        f"so the auxiliary is {side} than an early layer."
    )


# What says something where full prefill is mostly wrong: it needs no right answers.
_INSTEAD = (
    "go by how near each policy comes to it, in KL of the first answer token and in answers that "
    "are the same:"
)


def _sentence(verdict: Verdict) -> str:
    share = f"{100 * verdict.threshold:g} %"
    rows: Sequence[PolicyScore] = verdict.policies
    chosen = [row for row in rows if row.policy == verdict.recommended]
    if chosen:
        return (
            f"Recommended: {chosen[0].policy}, which keeps {_percent(chosen[0].kept)} % of full "
            f"prefill's score (surely {_percent(chosen[0].kept_low)} %, {share} asked) at "
            f"{chosen[0].ttft_ratio:.2f} times its time to the first token."
        )
    full = f"Recommended: {verdict.full.policy}"
    if not _stitches(verdict):
        return (
            f"{full}, because cached chunks do not give the numbers that they should on this model."
        )
    if any(row.kept_low >= verdict.threshold for row in rows):
        return f"{full}, because no policy that passes is sooner."
    if math.isnan(verdict.full.kept):
        return (
            f"{full}, because it scores nothing itself on these questions, so there is nothing to "
            f"compare with; check questions, answers and --max-new-tokens, or {_INSTEAD}"
        )
    if verdict.is_blurred:
        return (
            f"{full}, because it scores too low itself ({_percent(verdict.full.score)} % on "
            f"{plural(verdict.questions, 'question')}) to judge others by: "
            f"{_enough(verdict, share)}, so {_INSTEAD}"
        )
    return _undecided(verdict, full, share)


def _stitches(verdict: Verdict) -> bool:
    return all(check.passed for check in verdict.checks)


def _enough(verdict: Verdict, share: str) -> str:
    """Which number of questions would do where full prefill scores too low."""
    from kvcache_rag_lab.scoring.statistics import trials_without_loss, wilson

    full, open_share = verdict.full, 1 - verdict.threshold
    if not open_share:
        return f"no number of questions proves {share} (ask less with --keep)"
    if math.isnan(full.needed):
        most = wilson(0, verdict.questions)[1]  # that it may be right in, for all that is known
        least = trials_without_loss(open_share * most)
        return f"it is right in none of them, so {share} takes at least {least:,} like these"
    if verdict.questions < full.needed:
        return (
            f"proving that {share} is kept takes at least {full.needed:,.0f} questions like these, "
            "none of them lost"
        )
    undecided = [row for row in verdict.policies if row.kept_high >= verdict.threshold]
    width = min(row.kept - row.kept_low for row in undecided)
    count = _about(verdict.questions * (width / open_share) ** 2)
    return (
        f"answers differ so much that not even a policy that keeps all of it could prove {share}, "
        f"before {count} questions like these"
    )


def _undecided(verdict: Verdict, full: str, share: str) -> str:
    """No policy passes, though full prefill reads: what is missing."""
    asked, rows = verdict.threshold, verdict.policies
    close = max(rows, key=lambda row: (row.kept >= asked, row.kept_low))
    kept = f"{_percent(close.kept)} %"
    if close.kept >= asked:
        asked_of = plural(verdict.questions, "question", "proves", "prove")
        return (
            f"{full}; {close.policy} kept {kept} of its score, but {asked_of} "
            f"only {_percent(close.kept_low)} % where {share} is asked: give more questions "
            f"({_needed(verdict, close)}), or accept less with --keep."
        )
    said = f"{full}, because no policy keeps {share} of its score; the closest, {close.policy}, "
    if close.kept_high < asked:
        return f"{said}keeps {kept}."
    count = _about(verdict.questions * ((close.kept_high - close.kept) / (asked - close.kept)) ** 2)
    return (
        f"{said}keeps {kept}, and "
        f"{plural(verdict.questions, 'question', 'does', 'do')} not rule out "
        f"{_percent(close.kept_high)} %: {count} like these would."
    )


def _needed(verdict: Verdict, close: PolicyScore) -> str:
    """Which questions would prove what a policy seems to keep."""
    from kvcache_rag_lab.scoring.statistics import trials_without_loss

    if close.needed > verdict.questions:
        return f"{_about(close.needed)} like these"
    without_loss = trials_without_loss((1 - verdict.threshold) * verdict.full.score)
    return f"{without_loss} if none is lost"


def _about(count: float) -> str:
    """An estimate of a number of questions: two digits that count, and no end of them."""
    if count > _COUNTLESS:
        return f"more than {_COUNTLESS:,}"
    step = 10 ** max(0, math.floor(math.log10(max(1, count))) - 1)
    return f"about {math.ceil(round(count / step, 6)) * step:,}"  # 2,000.0001 is 2,000


def _nearness(rows: Sequence[PolicyScore]) -> Iterator[str]:
    """How near each policy comes to full prefill, the nearest first."""
    cells = [
        [_number(row.first_divergence), _percent(row.same_answer), row.policy]
        for row in sorted(rows, key=lambda row: row.first_divergence)
    ]
    yield from table([["KL first", "same answer", "policy"], *cells], right=frozenset({0, 1}))
