"""Fuzzing with atheris: branches that were not seen before say which inputs to go on from.

`python -m tests.fuzz.guided TARGET FLAGS-OF-LIBFUZZER`; it ends its process.  `tests.fuzz.fuzzing`
runs it.
"""

from __future__ import annotations

import logging
import random
import sys

import atheris

from tests.fuzz.mutation import mutated
from tests.fuzz.targets import TARGETS


def main() -> None:
    """Fuzz one target until a limit, or to the first input that breaks its law."""
    logging.disable(logging.CRITICAL)
    name, *flags = sys.argv[1:]
    target = TARGETS[name]
    with atheris.instrument_imports(include=list(target.instrumented)):
        check, _ = target.load()

    def mutate(data: bytes, longest: int, seed: int) -> bytes:
        chance = random.Random(seed)
        if chance.random() < 0.5:
            return bytes(atheris.Mutate(data, longest))
        return mutated(data, target.tokens, chance, longest)

    def run(data: bytes) -> None:
        try:
            check(data)
        except BaseException:
            sys.stderr.write(f"input: {data!r}\n")  # whatever becomes of the process
            raise

    atheris.Setup([sys.argv[0], *flags], run, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
