"""How many JSON schemas compile, and whether their grammars accept exactly the valid texts.

Reads test files in two formats: those of the JSON-Schema-Test-Suite (a list of groups, each with a schema and tests),
and single schemas with their tests (``{"schema": ..., "tests": [{"data": ..., "valid": ...}]}``, as in MaskBench).
FOLDER is one or several folders with such files, or the source distribution of the package jsonschema, which contains
the JSON-Schema-Test-Suite. Optional tests (formats and others) are not read.

    pip download --no-binary jsonschema --no-deps jsonschema
    python benchmarks/json_schema_suite.py jsonschema-*.tar.gz [--drafts draft2020-12 draft7] [--verbose]

--random-texts N also generates N random texts from each grammar, and checks them with the package jsonschema.
Property names of instances are written in the order in which the schema mentions them, because grammars fix this order.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from time import process_time
from typing import Any

import jsonschema
import numpy as np

import nucleate as nc
from nucleate.parameters.parameter import ParameterError
from nucleate.structured_output import CompiledGrammar, GrammarCompiler, StructuredOutputs
from nucleate.structured_output.spec import OnUnsupported

MAX_RANDOM_BYTES = 1500
DIALECTS = {
    "draft3": "http://json-schema.org/draft-03/schema#",
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}


@dataclass(frozen=True)
class Case:
    """A schema, and instances with whether they are valid."""

    name: str
    schema: Any
    instances: list[tuple[Any, bool]]


@dataclass
class Result:
    """Counts over the schemas of one suite."""

    compiled: int = 0
    refused: int = 0
    valid_taken: int = 0
    valid: int = 0
    invalid_taken: int = 0
    generated: int = 0  # random texts
    unreported: int = 0  # of them, with schemas without ignored keywords
    invalid: int = 0
    seconds: list[float] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    mistakes: list[str] = field(default_factory=list)


def cases(folder: Path, dialect: str | None = None) -> Iterator[Case]:
    """Yield the cases of the JSON files of a folder. dialect: ``$schema`` of schemas without one."""
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        for group in content if isinstance(content, list) else [content]:
            schema = group["schema"]
            if dialect is not None and isinstance(schema, dict):
                schema = {"$schema": dialect, **schema}
            name = f"{path.stem}: {group.get('description', '')}"
            yield Case(name, schema, [(test["data"], test["valid"]) for test in group.get("tests", [])])


def texts(instance: Any, names: list[str]) -> set[str]:
    """Return the texts of an instance, with its properties in its own order and in the order of ``names``."""
    return {json.dumps(value, ensure_ascii=False) for value in (instance, ordered(instance, names))}


def ordered(instance: Any, names: list[str]) -> Any:
    if isinstance(instance, list):
        return [ordered(item, names) for item in instance]
    if not isinstance(instance, dict):
        return instance
    rank = {name: index for index, name in reversed([*enumerate(names)])}
    return {name: ordered(instance[name], names) for name in sorted(instance, key=lambda name: rank.get(name, 10**9))}


def names_in(schema: Any) -> list[str]:
    """Return all property names of a schema, in the order of the text."""
    found: list[str] = []
    if isinstance(schema, dict):
        for keyword, value in schema.items():
            found += [*value] if keyword == "properties" and isinstance(value, dict) else []
            required = keyword == "required" and isinstance(value, list)
            found += [name for name in value if isinstance(name, str)] if required else []
            found += names_in(value)
    elif isinstance(schema, list):
        for item in schema:
            found += names_in(item)
    return found


class ByteWriter:
    """Checks texts byte for byte with a grammar."""

    def __init__(self) -> None:
        tokenizer = nc.LLM().tokenizer
        self.compiler = GrammarCompiler(tokenizer, 4096)
        table, special = tokenizer.pieces.table, tokenizer.special_ids
        self._mask_W = np.zeros(4096 // 32, np.int32)
        self._token_of = {tokenizer.pieces.as_bytes(token): token for token in table if token not in special}

    def accepts(self, compiled: CompiledGrammar, text: str) -> bool:
        matcher = compiled.matcher()
        try:
            for byte in text.encode(errors="surrogatepass"):
                matcher.accept_token(self._token_of[bytes([byte])])
        except (ValueError, RuntimeError):
            return False
        return matcher.accepting

    def random_text(self, compiled: CompiledGrammar, rng: Random) -> str | None:
        """Return a random text of a grammar, mostly letters and digits; None if it gets too long."""
        matcher, text = compiled.matcher(), b""
        while not (matcher.accepting and rng.random() < 0.5):
            matcher.fill_bitmask(self._mask_W)
            allowed = [byte for byte, token in self._token_of.items() if self._mask_W[token >> 5] >> (token & 31) & 1]
            ends = [byte for byte in allowed if byte in b'"]}']
            plain = [byte for byte in allowed if byte.isalnum()]
            if not allowed or len(text) > MAX_RANDOM_BYTES:
                return text.decode() if matcher.accepting else None
            chance = rng.random()
            some = ends if ends and (chance < 0.35 or len(text) > 300) else plain if plain and chance < 0.9 else allowed
            text += (byte := rng.choice(some))
            matcher.accept_token(self._token_of[byte])
        return text.decode()


def run(suite: list[Case], on_unsupported: OnUnsupported, writer: ByteWriter, random_texts: int = 0) -> Result:
    result, rng = Result(), Random(0)
    for case in suite:
        begin = process_time()
        try:
            spec = StructuredOutputs(json_schema=case.schema, on_unsupported=on_unsupported)
            compiled = writer.compiler.compile(spec)
        except ParameterError as error:
            result.seconds.append(process_time() - begin)
            result.refused += 1
            result.reasons[f"{error}"[:100]] += 1
            continue
        result.seconds.append(process_time() - begin)
        result.compiled += 1
        for text in filter(None, (writer.random_text(compiled, rng) for _ in range(random_texts))):
            result.generated += 1
            validator = jsonschema.validators.validator_for(case.schema, jsonschema.Draft202012Validator)
            if not validator(case.schema).is_valid(json.loads(text)):
                result.invalid_taken += 1
                result.unreported += not compiled.ignored
                result.mistakes.append(f"INVALID TEXT: {case.name}: {text!r:.80}")
        names = names_in(case.schema)
        for instance, valid in case.instances:
            taken = any(writer.accepts(compiled, text) for text in texts(instance, names))
            result.valid += valid
            result.invalid += not valid
            result.valid_taken += valid and taken
            result.invalid_taken += taken and not valid
            result.unreported += taken and not valid and not compiled.ignored
            if taken != valid:
                what = "valid refused" if valid else "INVALID" if compiled.ignored else "INVALID, UNREPORTED"
                result.mistakes.append(f"{what}: {case.name}: {instance!r:.80}")
    return result


def report(name: str, result: Result, verbose: bool) -> None:
    total = result.compiled + result.refused
    ordered_ms = sorted(1000 * seconds for seconds in result.seconds)
    print(
        f"{name:26} compiled {result.compiled:5} of {total} ({100 * result.compiled / max(total, 1):.1f} %), "
        f"valid texts taken {result.valid_taken} of {result.valid}, "
        f"invalid taken {result.invalid_taken} of {result.invalid + result.generated} "
        f"({result.unreported} unreported), "
        f"compile CPU ms p50 {statistics.median(ordered_ms):.1f} p99 {ordered_ms[int(0.99 * (total - 1))]:.1f} "
        f"max {ordered_ms[-1]:.1f}"
    )
    if verbose:
        for reason, count in result.reasons.most_common():
            print(f"    refused {count:4}: {reason}")
        for mistake in result.mistakes:
            print(f"    {mistake}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("paths", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--drafts", nargs="+", default=["draft2020-12", "draft7"], choices=[*DIALECTS])
    parser.add_argument("--random-texts", type=int, default=0, metavar="N", help="random texts per schema")
    parser.add_argument("--verbose", action="store_true", help="print the reasons of refusals, and wrong decisions")
    options = parser.parse_args()
    suites: dict[str, list[Case]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for path in options.paths:
            if path.is_dir():
                suites[path.name] = list(cases(path))
                continue
            with tarfile.open(path) as archive:
                archive.extractall(scratch, filter="data")
            for draft in options.drafts:
                [folder] = Path(scratch).glob(f"*/json/tests/{draft}")
                suites[draft] = list(cases(folder, DIALECTS[draft]))
    writer = ByteWriter()
    writer.compiler.compile(StructuredOutputs(json_object=True))  # the first one loads libraries
    for name, suite in suites.items():
        for on_unsupported in ("error", "ignore"):
            report(
                f"{name}, {on_unsupported}", run(suite, on_unsupported, writer, options.random_texts), options.verbose
            )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
